// Barrier.
//   steps: 1 (everybody announces, everybody waits for everybody)   bytes moved: none
#include "algo/algorithm.h"

namespace gradsync {

Status barrier(Team& team, Deadline deadline) {
  team.announce(pack_call(Op::barrier, Dtype::u8, Reduce::sum, 0), 0);
  return team.agree(deadline);
}

}  // namespace gradsync
