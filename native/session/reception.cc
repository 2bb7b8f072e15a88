#include "session/reception.h"

#include <string>

#include "session/founding.h"

namespace gradsync {
namespace {

std::string hex_of(const store::Id& id) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text;
  for (const auto byte : id) {
    const auto value = static_cast<unsigned char>(byte);
    text += {digits[value >> 4U], digits[value & 15U]};
  }
  return text;
}

// Waits for everybody and takes down what they say.
Status gather(Founder& founder, const Reception& reception, Deadline patience,
              std::vector<std::string>& all) {
  founder.prepare(static_cast<int>(reception.ranks), reception.staging_bytes, nullptr);
  Status status = founder.gather({}, patience);
  if (status.ok()) status = founder.check_guests();
  if (!status.ok()) return status;
  all.resize(reception.ranks);
  all[0] = reception.words;
  for (const Guest& guest : founder.guests()) {
    all[static_cast<std::size_t>(guest.index)] = guest.words;
  }
  return status;
}

// The slots of the first round at the store are filled as if the ranks had met there.
Status let_in(Founder& founder, const Reception& reception, store::Server& server,
              Deadline deadline, const std::vector<std::string>& all,
              std::unique_ptr<Session>& out) {
  store::Entries entries;
  std::string told = hex_of(server.instance());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    entries.emplace_back(reception.slots + std::to_string(rank), all[rank]);
    told += '\n' + all[rank];
  }
  // Whoever has been let in may connect at once. It is answered when somebody runs the server: to
  // start its thread takes longer than to let everybody in.
  Status status = server.listen(entries);
  return status.ok() ? founder.found(nullptr, told, deadline, out) : status;
}

}  // namespace

Status receive(const Reception& reception, store::Server& server, Deadline patience,
               Deadline deadline, std::vector<std::string>& all, std::unique_ptr<Session>& out) {
  Founder founder;
  if (Founder::open(reception.door, reception.secret, founder).ok()) {
    Status status = gather(founder, reception, patience, all);
    if (status.ok()) return let_in(founder, reception, server, deadline, all, out);
    if (status.code == Code::interrupted) return status;
  }
  Status status = server.listen({});
  if (status.ok()) status = server.run();
  founder.turn_away(Status::error(Code::timeout, "the ranks meet at the store"));
  return status;
}

}  // namespace gradsync
