// Ranks for tests: as threads of this process, or as forked processes that may be killed.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "session/founding.h"
#include "tests/check.h"

namespace gradsync::testing {

inline constexpr std::size_t small_staging = 64 * 1024;  // makes small tensors take many chunks

// Runs body(session) on `ranks` threads over one segment.
inline void run_threads(int ranks, const std::function<void(Session&)>& body,
                        std::size_t staging = small_staging, bool open = false) {
  std::vector<std::unique_ptr<Session>> sessions;
  CHECK_OK(found_local(ranks, staging, {}, sessions, open));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      // Owned by the thread, so that it says goodbye when its rank is done.
      const std::unique_ptr<Session> session = std::move(sessions[static_cast<std::size_t>(rank)]);
      CHECK_OK(session->enter(Deadline::after(30)));
      body(*session);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Pipe {
  Fd read_end, write_end;

  Pipe() {
    int ends[2];
    CHECK(::pipe2(ends, O_CLOEXEC) == 0);
    read_end = Fd(ends[0]);
    write_end = Fd(ends[1]);
  }
  void send(const void* data, std::size_t bytes) const {
    CHECK(::write(write_end.get(), data, bytes) == static_cast<ssize_t>(bytes));
  }
  void receive(void* data, std::size_t bytes) const {
    CHECK(::read(read_end.get(), data, bytes) == static_cast<ssize_t>(bytes));
  }
};

struct LobbyAddress {
  char name[64] = {};
  Secret secret{};
};

// The host of forked ranks: opens the lobby in its own process, as rendezvous makes it do, tells
// the parent where it is and learns the others' pids.
inline Status host_session(const Pipe& out, const Pipe& in, std::size_t ranks, std::size_t staging,
                           Deadline deadline, std::unique_ptr<Session>& session) {
  Founder founder;
  Status status = Founder::open(founder);
  if (!status.ok()) return status;
  LobbyAddress address;
  founder.lobby().name().copy(address.name, sizeof(address.name) - 1);
  address.secret = founder.lobby().secret();
  out.send(&address, sizeof(address));
  std::vector<int> pids(ranks);
  in.receive(pids.data(), ranks * sizeof(int));
  founder.prepare(static_cast<int>(ranks), staging, nullptr);
  status = founder.gather(pids, deadline);
  return status.ok() ? founder.found(nullptr, "", deadline, session) : status;
}

inline Status join_session(const LobbyAddress& address, int rank, int ranks, Deadline deadline,
                           std::unique_ptr<Session>& out) {
  Fd socket;
  const Status status = reach_lobby(address.name, socket);
  if (!status.ok()) return status;
  std::string words;
  return join_founder(std::move(socket), address.secret, rank, ranks, nullptr, deadline, words,
                      out);
}

// Forks `ranks` processes that open a session and run body, which returns the exit code.
inline std::vector<pid_t> fork_ranks(int ranks, const std::function<int(Session&)>& body,
                                     std::size_t staging = small_staging) {
  const Pipe to_parent, to_host;
  const auto count = static_cast<std::size_t>(ranks);
  std::vector<pid_t> pids(count);
  LobbyAddress address;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = ::fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      const Deadline deadline = Deadline::after(30);
      std::unique_ptr<Session> session;
      const Status status =
          rank == 0 ? host_session(to_parent, to_host, count, staging, deadline, session)
                    : join_session(address, rank, ranks, deadline, session);
      ::_exit(status.ok() ? body(*session) : 100 + static_cast<int>(status.code));
    }
    pids[static_cast<std::size_t>(rank)] = pid;
    if (rank == 0) to_parent.receive(&address, sizeof(address));
  }
  to_host.send(pids.data(), count * sizeof(pid_t));
  return pids;
}

// Waits for a child; -1 when it is still running after the time given (it is killed then).
inline int exit_status(pid_t pid, double timeout_s) {
  const Deadline deadline = Deadline::after(timeout_s);
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (deadline.expired()) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      return -1;
    }
    ::usleep(500);
  }
  return status;
}

inline int count_entries(const char* folder) {
  DIR* directory = ::opendir(folder);
  if (directory == nullptr) return 0;
  int count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

// Teams of one process that share a segment, without sessions around them.
struct Teams {
  explicit Teams(int ranks) {
    CHECK_OK(
        Segment::create(segment_bytes(static_cast<std::size_t>(ranks), small_staging), segment));
    Team::format(segment.data(), ranks, small_staging);
    for (int rank = 0; rank < ranks; ++rank) {
      each.emplace_back(segment.data(), rank, ranks, Liveness());
    }
  }
  Team& operator[](std::size_t rank) { return each[rank]; }

  Segment segment;
  std::deque<Team> each;
};

}  // namespace gradsync::testing
