// Which line of the user's program asked for the call that a thread carries out. Looked up only
// when something goes wrong or takes long, so a call that goes well does not pay for it.
#pragma once

#include <atomic>
#include <string>

namespace gradsync {

class Site {
 public:
  virtual ~Site() = default;
  virtual std::string text() const = 0;
};

// Set while a thread carries out a call that another line than its own asked for.
inline thread_local const Site* asked_at = nullptr;

class AskedAt {
 public:
  explicit AskedAt(const Site* site) : before_(asked_at) { asked_at = site; }
  ~AskedAt() { asked_at = before_; }
  AskedAt(const AskedAt&) = delete;
  AskedAt& operator=(const AskedAt&) = delete;

 private:
  const Site* before_;
};

// Tells the present thread's own line; set by the embedding language.
inline std::atomic<std::string (*)()> site_hook{nullptr};

inline std::string present_site() {
  if (asked_at != nullptr) return asked_at->text();
  std::string (*const hook)() = site_hook.load(std::memory_order_relaxed);
  return hook == nullptr ? "" : hook();
}

}  // namespace gradsync
