// The one instruction that tells a core it is spinning; the only inline assembly of the core.
#pragma once

namespace gradsync {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" is a no-op on most Arm cores; isb waits a little
#endif
}

}  // namespace gradsync
