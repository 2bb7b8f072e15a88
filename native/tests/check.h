// A test harness of one header: TEST(name) { CHECK(...); } and a main that runs and counts them.
// A first argument runs only the tests whose name contains it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace gradsync::testing {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

// A failed check ends the process: the state after it is unknown, and ctest reports the line.
[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what.c_str());
  std::exit(1);
}

}  // namespace gradsync::testing

#define TEST(name)                                                                  \
  static void name();                                                               \
  static const ::gradsync::testing::Registration name##_registration{#name, &name}; \
  static void name()

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) ::gradsync::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_OK(expression)                                                                  \
  do {                                                                                        \
    const auto check_status = (expression);                                                   \
    if (!check_status.ok()) {                                                                 \
      ::gradsync::testing::fail(__FILE__, __LINE__, #expression ": " + check_status.message); \
    }                                                                                         \
  } while (false)

int main(int argc, char** argv) {
  int passed = 0;
  for (const auto& test : gradsync::testing::cases()) {
    if (argc > 1 && std::string(test.name).find(argv[1]) == std::string::npos) continue;
    std::fprintf(stderr, "[ run ] %s\n", test.name);
    test.body();
    ++passed;
  }
  std::fprintf(stderr, "%d passed\n", passed);
  return passed > 0 ? 0 : 1;
}
