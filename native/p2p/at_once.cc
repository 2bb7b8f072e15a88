// The short way of small messages: straight from the caller's memory to the ring and back, without
// a request, where nothing is before them that they would overtake.
#include <mutex>

#include "p2p/mailbox.h"
#include "sync/pause.h"

namespace gradsync {
namespace {

// While the embedding language's lock is held: what may be copied, less than a microsecond's worth,
// and how often a receiver polls, 1 to 2 us. Letting go of the lock and taking it back costs 0.1
// us, and in a conversation the answer often comes as soon.
constexpr std::size_t most_now = 4096;
constexpr int polls_now = 40;

}  // namespace

bool Mailbox::run_now(const Transfer& transfer, int& source) {
  if (transfer.extent.bytes() > most_now || !check(transfer).ok()) return false;
  source = transfer.peer;
  Inbox::Found found = try_at_once(transfer);
  for (int i = 0; i < polls_now && found == Inbox::Found::nothing; ++i) {
    pause_briefly();
    if (inbox_.ring(transfer.peer).has_news()) found = try_at_once(transfer);
  }
  return found == Inbox::Found::taken;
}

bool Mailbox::run_at_once(const Transfer& transfer, int& source) {
  source = transfer.peer;
  Inbox::Found found = try_at_once(transfer);
  if (found == Inbox::Found::nothing) {
    team_.part_from(transfer.peer);
    const RingReader& ring = inbox_.ring(transfer.peer);
    if (perseverance_.spin(team_.patience(), [&] { return ring.has_news(); })) {
      found = try_at_once(transfer);
    }
  }
  return found == Inbox::Found::taken;
}

Inbox::Found Mailbox::try_at_once(const Transfer& transfer) {
  constexpr auto other = Inbox::Found::other;
  if (transfer.peer == any_source || transfer.peer == team_.rank()) return other;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || closed_ || !lost_[static_cast<std::size_t>(transfer.peer)].ok() ||
      outbox_.has_complaint(transfer.peer) || !team_.check_aborted().ok()) {
    return other;
  }
  if (!transfer.is_send) {
    // While something is left to be sent, whoever waits moves it.
    return outbox_.unfinished() > 0 ? other : inbox_.take_at_once(transfer);
  }
  // A sender that only ever came this way would not notice that the receiver is gone.
  if (next_look_.expired()) return other;
  return outbox_.send_at_once(transfer) ? Inbox::Found::taken : other;
}

}  // namespace gradsync
