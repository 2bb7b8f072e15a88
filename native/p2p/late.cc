// Messages that do not come: said once after a while, and when the time is over.
#include <string>
#include <utility>
#include <vector>

#include "common/site.h"
#include "p2p/mailbox.h"

namespace gradsync {

void Mailbox::wait_goes_on(const Request& request, LongLook& look) const {
  const auto now = Deadline::Clock::now();
  if (!look.since) look.since = now;
  const auto patience = std::chrono::nanoseconds(late_after_ns.load(std::memory_order_relaxed));
  auto* const hook = late_hook.load(std::memory_order_relaxed);
  if (look.told || hook == nullptr || patience.count() == 0 || now - *look.since < patience) return;
  look.told = true;
  hook({.group = team_.name(),
        .places = team_.places(),
        .rank = team_.rank(),
        .ranks = team_.size(),
        .call = {},
        .missing = {},
        .seconds = std::chrono::duration<double>(now - *look.since).count(),
        .site = present_site(),
        .message = request.transfer().text()});
}

Status Mailbox::late(const Request& request) const {
  const Transfer& transfer = request.transfer();
  std::vector<int> missing;
  for (int peer = 0; peer < team_.size(); ++peer) {
    const bool meant = transfer.peer == any_source ? peer != team_.rank() : peer == transfer.peer;
    if (meant && lost_[static_cast<std::size_t>(peer)].ok()) missing.push_back(peer);
  }
  const std::string text = transfer.is_send
                               ? std::to_string(request.written) + " of " +
                                     std::to_string(transfer.extent.bytes()) +
                                     " bytes could be written; the receiver takes nothing"
                               : "no such message came" + inbox_.others_waiting(transfer.peer);
  return Status::error(Code::timeout, text, std::move(missing));
}

}  // namespace gradsync
