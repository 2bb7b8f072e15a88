#include "store/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace gradsync::store {

bool Connection::receive(std::size_t limit) {
  char* const room = input.room();
  const ssize_t got = ::recv(fd(), room, std::min(limit, input.room_size()), 0);
  if (got > 0) input.arrived(static_cast<std::size_t>(got));
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

bool Connection::flush() {
  while (written_ < output.size()) {
    const ssize_t sent =
        ::send(fd(), output.data() + written_, output.size() - written_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      // What has gone out must not pile up in front of what a slow peer still has to take.
      if (written_ > keep_output) {
        output.erase(0, written_);
        written_ = 0;
      }
      return errno == EAGAIN;
    }
    written_ += static_cast<std::size_t>(sent);
  }
  written_ = 0;
  output.clear();
  if (output.capacity() > keep_output) output = {};
  return true;
}

}  // namespace gradsync::store
