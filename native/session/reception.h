// How the ranks of one host become a world in one round trip: rank 0 opens a door beside the name
// of the store that it is about to serve, and everybody who comes leaves with the memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "memory/handoff.h"
#include "session/session.h"
#include "store/server.h"

namespace gradsync {

struct Reception {
  std::string door;
  Secret secret{};
  std::size_t staging_bytes = 0;
  std::string words;  // what rank 0 says of itself
  std::size_t ranks = 0;
  std::string slots;  // where everybody's words are to be in the store, followed by the rank
};

// Rank 0's part; the name of `server` is taken already. When this succeeds others may connect to
// it, and are answered once it runs. `all` gets everybody's words, and so does everybody, after the
// server's instance, each on a line.
//
// Success without a session: somebody did not come before `patience` was over, left again or does
// not fit in; all are to meet at the store, which runs then and knows how to tell what is wrong.
Status receive(const Reception& reception, store::Server& server, Deadline patience,
               Deadline deadline, std::vector<std::string>& all, std::unique_ptr<Session>& out);

}  // namespace gradsync
