// Whether the cores that a rank may count on are in use by its other threads.
#pragma once

#include <cstdint>

namespace gradsync {

class CoreUse {
 public:
  // How many cores the rank may count on; more ranks than cores have less than one each.
  void set_share(double cores) { share_ = cores; }

  // Whether the other threads of this process have used most of them since the last look. Looks
  // that follow too soon repeat the answer.
  bool is_high() {
    const Times now = read();
    const std::int64_t wall = now.wall_ns - last_.wall_ns;
    if (wall >= shortest_ns) {
      high_ = static_cast<double>(now.others_ns - last_.others_ns) >=
              most * share_ * static_cast<double>(wall);
      last_ = now;
    }
    return high_;
  }
  // Whether the last look was so long ago that the next one would say little about the present.
  bool is_stale() const { return read().wall_ns - last_.wall_ns > longest_ns; }

 private:
  static constexpr double most = 0.75;
  static constexpr std::int64_t shortest_ns = 150'000;
  static constexpr std::int64_t longest_ns = 10'000'000;

  struct Times {
    std::int64_t wall_ns = 0;
    std::int64_t others_ns = 0;  // of a core
  };
  static Times read();

  double share_ = 1.0;
  Times last_;
  bool high_ = false;
};

}  // namespace gradsync
