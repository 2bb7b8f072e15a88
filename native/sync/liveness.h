// Who is still there. A pidfd per peer: the kernel makes it readable the moment the process is
// dead, SIGKILL included, without a launcher, a parent or a heartbeat. Processes that live beside a
// rank (data-loader workers, subprocesses) are not the rank, so they do not keep it alive here.
#pragma once

#include <string>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

namespace gradsync {

class Liveness {
 public:
  Liveness() = default;
  // One pidfd per rank, in rank order; an invalid one (threads as ranks) is never dead.
  explicit Liveness(std::vector<Fd> pidfds) : pidfds_(std::move(pidfds)) {}

  // The ranks whose process has ended; one poll(2) for all.
  std::vector<int> dead() const;

  // "killed by SIGKILL", "exited with code 3", or "" when the system does not tell.
  std::string how_it_ended(int rank, int pid) const;

  // What the system says of a process that does not answer: "stopped by a signal", say, or "".
  std::string what_it_does(int rank) const;

 private:
  std::vector<Fd> pidfds_;
};

}  // namespace gradsync
