// How a group comes to be: its rank 0 opens a lobby and makes the memory, the others come, and each
// is handed the memory and a pidfd of every rank.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "common/deadline.h"
#include "memory/arena.h"
#include "memory/handoff.h"
#include "memory/segment.h"
#include "session/session.h"

namespace gradsync {

// What rank 0 does. A sub-group shares the arena of its `world`; without one, there is a new arena.
class Founder {
 public:
  static Status open(Founder& out) { return Lobby::open(out.lobby_); }
  // Under a name that the others know, and with a secret that they have.
  static Status open(const std::string& name, const Secret& secret, Founder& out) {
    return Lobby::open(name, secret, out.lobby_);
  }
  const Lobby& lobby() const { return lobby_; }

  // Makes the memory, which is best done before anybody waits for it. Should that fail, found()
  // says so, to the guests as well.
  void prepare(int ranks, std::size_t staging_bytes, const Session* world);

  // Waits for everybody. `pids` are the ranks' processes as far as they are known, 0 otherwise: one
  // that dies on the way is named at once, to the guests that came as well. After a timeout, which
  // names those who are missing, it may be called again.
  Status gather(const std::vector<int>& pids, Deadline deadline);
  // Those that have come so far.
  const std::vector<Guest>& guests() const { return guests_; }
  // Fails when one of them has left again.
  Status check_guests() const;
  // Tells the guests that came why there will be no group: they must not wait for their own
  // deadline.
  void turn_away(const Status& why);
  // Hands out the memory to those that were gathered, with words for all of them.
  Status found(const Session* world, const std::string& words, Deadline deadline,
               std::unique_ptr<Session>& out);

 private:
  Status watch(const std::vector<int>& pids);
  // The scheduler often wakes processes that wait for each other on one core, where they take turns
  // of a millisecond.
  void leave_guests_cores() const;

  Lobby lobby_;
  int ranks_ = 0;
  Status prepared_;
  Segment segment_;
  std::shared_ptr<Arena> arena_;
  std::vector<Fd> expected_;  // a pidfd per rank, where it can be had
  std::vector<Guest> guests_;
  std::vector<Identity> identities_;  // of those that came, by rank
};

// What the others do, over a socket from reach_lobby(). `words` go to rank 0, and come back as what
// it has for all.
Status join_founder(Fd socket, const Secret& secret, int rank, int ranks, const Session* world,
                    Deadline deadline, std::string& words, std::unique_ptr<Session>& out);

// Ranks that are threads of this process, on one mapping (where the thread sanitizer sees all of
// them). Each rank's own thread must call enter() before anything else. For a sub-group, `worlds`
// are its ranks' sessions in their world; for a world it is empty.
Status found_local(int ranks, std::size_t staging_bytes, const std::vector<const Session*>& worlds,
                   std::vector<std::unique_ptr<Session>>& out, bool open = false);

}  // namespace gradsync
