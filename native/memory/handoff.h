// Handing descriptors from one process to another over a Unix socket in the abstract namespace:
// no file to leave behind, no port to open. Both ends check through the kernel that the other runs
// as the same user, and the guest proves that it knows the host's secret.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/fd.h"
#include "common/status.h"

namespace gradsync {

using Secret = std::array<std::uint8_t, 16>;

// A connected guest, as the host sees it.
struct Guest {
  int index = -1;     // what the guest says it is
  std::string words;  // what else it has to say
  Fd socket;
  Fd pidfd;  // refers to the guest's process, whatever pid namespace it lives in
};

// Listens under a random name, with a random secret; or under a name and with a secret that guests
// know beforehand. In the latter, guests that do not fit in are a failure, as are those that leave:
// there may be others who took the same name, and whoever is told so can look into it.
class Lobby {
 public:
  Lobby() = default;
  Lobby(Lobby&&) = default;
  Lobby& operator=(Lobby&&) = default;
  ~Lobby();

  static Status open(Lobby& out);
  static Status open(const std::string& name, const Secret& secret, Lobby& out);

  const std::string& name() const { return name_; }
  bool is_known() const { return is_known_; }
  const Secret& secret() const { return secret_; }

  // Waits for the guests with the indices 1..count-1, each once; what is no guest of ours is
  // dropped. On timeout Status.ranks holds the indices that did not come. `expected` may hold a
  // pidfd per index of a process that is known to be on its way: if it dies, so does the waiting.
  Status gather(int count, Deadline deadline, const std::vector<Fd>& expected,
                std::vector<Guest>& guests);

 private:
  Status wait_for_guest(int count, Deadline deadline, const std::vector<Fd>& expected,
                        const std::vector<Guest>& guests) const;
  Status admit(Fd socket, int count, Deadline deadline, std::vector<Guest>& guests);
  Status listen();

  Fd socket_;
  std::string name_;
  Secret secret_{};
  bool is_known_ = false;  // its name and secret
  int owner_ = 0;          // the process that opened it
};

// Connects to a lobby; fails when no such lobby can be reached from here, after trying for a moment
// (see common/moment.h).
Status reach_lobby(const std::string& name, Fd& out, std::chrono::microseconds moment = {});

// Whether the process at the other end has hung up.
bool has_hung_up(const Fd& socket);

// Introduces the caller to the lobby it reached, with at most `most_words` bytes of words.
inline constexpr std::size_t most_words = 4096;
Status introduce(const Fd& socket, int index, const Secret& secret, const std::string& words = "");

// A descriptor that becomes readable when the process at the other end of a Unix socket ends.
Status peer_pidfd(const Fd& socket, Fd& out);

// Sends a fixed message and then any number of descriptors. Receiving ends at once when `sender`, a
// pidfd, says that the other side is dead: a fork of it may keep the socket open.
Status send_descriptors(const Fd& socket, std::span<const std::uint8_t> message,
                        std::span<const int> descriptors, Deadline deadline);
Status receive_descriptors(const Fd& socket, std::span<std::uint8_t> message, std::size_t count,
                           Deadline deadline, const Fd& sender, std::vector<Fd>& out);

// A descriptor that becomes readable when the process ends.
Status open_pidfd(int pid, Fd& out);

}  // namespace gradsync
