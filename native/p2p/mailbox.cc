#include "p2p/mailbox.h"

#include <algorithm>
#include <new>
#include <utility>

#include "common/interrupt.h"
#include "common/site.h"
#include "sync/futex.h"

namespace gradsync {
namespace {

std::vector<Outbox::Outlet> outlets(const std::shared_ptr<Segment>& segment, std::size_t offset,
                                    int rank, int ranks) {
  const MailLayout layout{static_cast<std::size_t>(ranks)};
  const auto own = static_cast<std::size_t>(rank);
  const std::size_t capacity = ring_bytes(layout.ranks);
  std::byte* base = segment->data() + offset;
  std::vector<Outbox::Outlet> all;
  for (std::size_t peer = 0; peer < layout.ranks; ++peer) {
    auto* words = std::launder(reinterpret_cast<RingWords*>(base + layout.words(own, peer)));
    auto* bell = std::launder(reinterpret_cast<Doorbell*>(base + layout.doorbell(peer)));
    const std::size_t ring = layout.ring(own, peer);
    all.push_back({RingWriter(*words, base + ring, capacity), bell, capacity,
                   [segment = segment.get(), at = offset + ring, capacity] {
                     return segment->reserve(at, capacity);
                   }});
  }
  return all;
}

std::vector<Inbox::Inlet> inlets(const Segment& segment, std::size_t offset, int rank, int ranks) {
  const MailLayout layout{static_cast<std::size_t>(ranks)};
  const auto own = static_cast<std::size_t>(rank);
  const std::size_t capacity = ring_bytes(layout.ranks);
  std::byte* base = segment.data() + offset;
  std::vector<Inbox::Inlet> all;
  for (std::size_t peer = 0; peer < layout.ranks; ++peer) {
    auto* words = std::launder(reinterpret_cast<RingWords*>(base + layout.words(peer, own)));
    auto* bell = std::launder(reinterpret_cast<Doorbell*>(base + layout.doorbell(peer)));
    all.push_back({RingReader(*words, base + layout.ring(peer, own), capacity, *bell), capacity});
  }
  return all;
}

Status destroyed(int rank) {
  return Status::error(Code::aborted, "the group was destroyed while it was in flight", {rank});
}

}  // namespace

Mailbox::Mailbox(Team& team, std::shared_ptr<Segment> segment, std::size_t offset)
    : team_(team),
      segment_(std::move(segment)),
      bell_(std::launder(
          reinterpret_cast<Doorbell*>(segment_->data() + offset +
                                      MailLayout{static_cast<std::size_t>(team.size())}.doorbell(
                                          static_cast<std::size_t>(team.rank()))))),
      inbox_(team.rank(), inlets(*segment_, offset, team.rank(), team.size()), ended_),
      outbox_(outlets(segment_, offset, team.rank(), team.size()), ended_),
      lost_(static_cast<std::size_t>(team.size())) {}

Mailbox::~Mailbox() { close(Deadline::after(0)); }

void Mailbox::close(Deadline deadline) {
  if (!is_ours()) {
    (void)worker_.release();  // the thread does not exist here
    return;
  }
  while (!is_drained() && !deadline.expired()) {
    const std::uint32_t seen = bell_->rings.load(std::memory_order_acquire);
    if (!advance()) sleep(seen, deadline.remaining_ns(look_around_ns));
  }
  std::vector<RequestPtr> ended;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    end_all(destroyed(team_.rank()));
    ended = take_ended();
  }
  tell(ended, 0);
  stop_worker();
}

bool Mailbox::is_drained() {
  const std::scoped_lock lock(mutex_);
  if (next_look_.expired()) look_around();
  return closed_ || outbox_.unfinished() == 0;
}

Status Mailbox::check(const Transfer& transfer) const {
  if (!is_ours()) {
    return Status::error(Code::invalid,
                         "this process is a fork of rank " + std::to_string(team_.rank()) +
                             " and not a rank itself; only the rank may use its group, so pass it "
                             "what it shall send");
  }
  if (transfer.tag < 0) {
    return Status::error(Code::invalid,
                         "a tag must not be negative, got " + std::to_string(transfer.tag));
  }
  const bool anyone = !transfer.is_send && transfer.peer == any_source;
  if (!anyone && (transfer.peer < 0 || transfer.peer >= team_.size())) {
    return Status::error(Code::invalid, "no rank " + std::to_string(transfer.peer) +
                                            " in a group of " + std::to_string(team_.size()));
  }
  return Status::success();
}

Status Mailbox::post(Transfer transfer, RequestPtr& out) {
  Status status = check(transfer);
  if (!status.ok()) return status;
  out = std::make_shared<Request>(std::move(transfer));
  std::vector<RequestPtr> ended;
  {
    const std::scoped_lock lock(mutex_);
    status = admit(out);
    ended = take_ended();
    if (!out->done() && status.ok()) attend();
  }
  tell(ended, 0);
  return status;
}

Status Mailbox::run(Transfer transfer, int& source) {
  Status status = check(transfer);
  if (!status.ok() || run_at_once(transfer, source)) return status;
  const RequestPtr request = std::make_shared<Request>(std::move(transfer));
  std::vector<RequestPtr> ended;
  {
    const std::scoped_lock lock(mutex_);
    status = admit(request);
    ended = take_ended();
  }
  tell(ended, 0);
  if (!status.ok()) return status;
  status = wait(*request, Deadline::never());
  if (!status.ok()) {
    // Interrupted: the caller takes its memory back.
    {
      const std::scoped_lock lock(mutex_);
      cancel(request, status);
      ended = take_ended();
    }
    tell(ended, 0);
    return status;
  }
  source = request->source();
  return request->status();
}

Status Mailbox::admit(const RequestPtr& request) {
  const Transfer& transfer = request->transfer();
  if (next_look_.expired()) look_around();
  if (closed_) return destroyed(team_.rank());
  Status status = team_.check_aborted();
  if (!status.ok()) return status;
  const bool to_self = transfer.peer == team_.rank();
  if (transfer.peer != any_source && !to_self) {
    status = outbox_.complaint(transfer.peer);
    if (!status.ok()) {
      status.message += " (an earlier send; this call was not carried out)";
      return status;
    }
  }
  if (!transfer.is_send) {
    inbox_.post(request);
    if (!request->done()) (void)inbox_.pull(outbox_.unfinished() > 0);
    end_hopeless_receives();
    return Status::success();
  }
  if (to_self) {
    inbox_.hand_over(request);
    return Status::success();
  }
  const Status& lost = lost_[static_cast<std::size_t>(transfer.peer)];
  return lost.ok() ? outbox_.post(request) : lost;
}

Status Mailbox::wait(Request& request, Deadline until) {
  if (request.done()) return Status::success();
  if (!is_ours()) return check({});
  // Both words are changed by read-modify-write operations on either side, see tell().
  waiters_.fetch_add(1, std::memory_order_acq_rel);
  waits_.fetch_add(1, std::memory_order_relaxed);
  const Site* const site = request.transfer().site.get();
  const AskedAt here(site != nullptr ? site : asked_at);
  const Status status = wait_here(request, until);
  waiters_.fetch_sub(1, std::memory_order_acq_rel);
  return status;
}

Status Mailbox::wait_here(Request& request, Deadline until) {
  LongLook look;
  for (int round = 1;; ++round) {
    const std::uint32_t seen = bell_->rings.load(std::memory_order_acquire);
    const bool moved = advance(1);
    if (request.done()) return Status::success();
    if (moved) look.since.reset();  // slow is not late
    const auto has_rung = [&] {
      return bell_->rings.load(std::memory_order_acquire) != seen || request.done();
    };
    const bool news = moved || perseverance_.spin(team_.patience(), has_rung);
    // Others' traffic must not keep us from looking at the clock.
    if (news && round % 64 != 0) continue;
    team_.part_from(request.transfer().peer);
    if (interrupted()) return interrupted_status();
    std::vector<RequestPtr> ended;
    {
      const std::scoped_lock lock(mutex_);
      if (next_look_.expired() || request.transfer().deadline.expired()) look_around();
      ended = take_ended();
    }
    tell(ended, 1);
    if (request.done()) return Status::success();
    if (until.expired()) return Status::error(Code::timeout, "the request is not over yet");
    // Whoever has moved something may be able to move more, and nobody rings for that.
    if (news) continue;
    wait_goes_on(request, look);
    const std::int64_t most = request.transfer().deadline.remaining_ns(look_around_ns);
    sleep(seen, until.remaining_ns(most));
  }
}

void Mailbox::sleep(std::uint32_t seen, std::int64_t most_ns) {
  bell_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (bell_->rings.load(std::memory_order_seq_cst) == seen) {
    futex_wait(bell_->rings, seen, most_ns);
  }
  bell_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool Mailbox::advance(int waiting) {
  std::vector<RequestPtr> ended;
  bool moved = false;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) return false;
    moved = outbox_.push();
    moved = inbox_.pull(outbox_.unfinished() > 0) || moved;
    ended = take_ended();
  }
  tell(ended, waiting);
  return moved;
}

std::vector<RequestPtr> Mailbox::take_ended() {
  unfinished_.store(inbox_.unfinished() + outbox_.unfinished(), std::memory_order_seq_cst);
  return ended_.take();
}

void Mailbox::tell(const std::vector<RequestPtr>& ended, int waiting) {
  if (ended.empty()) return;
  // Either this comes after a waiter has counted itself, and we wake it; or before, and the waiter,
  // which looks at its request after that, sees that it is over.
  if (waiters_.fetch_add(0, std::memory_order_acq_rel) > waiting) ring_doorbell(*bell_);
  for (const RequestPtr& request : ended) request->tell();
}

void Mailbox::cancel(const RequestPtr& request, const Status& status) {
  if (request->done()) return;
  if (request->transfer().is_send) {
    outbox_.cancel(request, status);
  } else {
    inbox_.cancel(request, status);
  }
}

std::vector<RequestPtr> Mailbox::all() const {
  std::vector<RequestPtr> requests;
  const auto add = [&](const RequestPtr& request) { requests.push_back(request); };
  inbox_.for_each(add);
  outbox_.for_each(add);
  return requests;
}

void Mailbox::end_all(const Status& status) {
  for (const RequestPtr& request : all()) cancel(request, status);
}

void Mailbox::look_around() {
  next_look_ = Deadline::after(1e-9 * look_around_ns);
  const Status aborted = team_.check_aborted();
  if (!aborted.ok()) {
    end_all(aborted);
    return;
  }
  for (const int peer : team_.departed()) {
    if (peer != team_.rank() && lost_[static_cast<std::size_t>(peer)].ok()) note_departure(peer);
  }
  for (const RequestPtr& request : all()) {
    if (request->transfer().deadline.expired()) cancel(request, late(*request));
  }
}

void Mailbox::note_departure(int peer) {
  // What it had sent before it went still counts.
  while (inbox_.pull_from(peer, true)) {
  }
  Status& why = lost_[static_cast<std::size_t>(peer)];
  why = team_.why_gone(peer);
  inbox_.fail(peer, why);
  outbox_.fail(peer, why);
  end_hopeless_receives();
}

void Mailbox::end_hopeless_receives() {
  // Who dies may have been the one to send to a receive from any rank; nobody can tell. Who leaves
  // in peace was not, unless nobody else is left.
  Status hopeless;
  std::size_t gone = 0;
  for (std::size_t peer = 0; peer < lost_.size(); ++peer) {
    if (lost_[peer].ok()) continue;
    ++gone;
    if (hopeless.ok() && !team_.has_left(static_cast<int>(peer))) hopeless = lost_[peer];
  }
  if (gone == 0) return;
  if (hopeless.ok() && gone + 1 == lost_.size()) {
    hopeless = *std::find_if(lost_.begin(), lost_.end(), [](const Status& s) { return !s.ok(); });
  }
  for (const RequestPtr& request : all()) {
    const Transfer& transfer = request->transfer();
    if (transfer.is_send) continue;
    const Status& why =
        transfer.peer == any_source ? hopeless : lost_[static_cast<std::size_t>(transfer.peer)];
    if (!why.ok()) cancel(request, why);
  }
}

}  // namespace gradsync
