#include "sync/whereabouts.h"

#include <unistd.h>

#include "sync/futex.h"

namespace gradsync {
namespace {

// Nothing but a question or the end should wake a listener; waking once an hour costs nothing.
constexpr std::int64_t an_hour_ns = 3'600'000'000'000;

}  // namespace

Whereabouts Whereabouts::of(const std::vector<int>& ranks) const {
  std::vector<int> places;
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    if (index < places_.size()) places.push_back(places_[index]);
  }
  return {memory_, slots_, std::move(places)};
}

std::vector<std::string> Whereabouts::ask(const std::vector<int>& ranks, Deadline deadline) const {
  std::vector<std::string> answers(ranks.size());
  std::vector<std::uint32_t> questions(ranks.size(), 0);
  const auto slot_of = [&](std::size_t i) -> Slot& {
    return slots_[places_[static_cast<std::size_t>(ranks[i])]];
  };
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (static_cast<std::size_t>(ranks[i]) >= places_.size()) continue;
    Slot& theirs = slot_of(i);
    if (theirs.listening.load(std::memory_order_acquire) == 0) continue;
    questions[i] = theirs.question.fetch_add(1, std::memory_order_acq_rel) + 1;
    futex_wake_all(theirs.question);
  }
  bool open = true;
  while (open) {
    open = false;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (questions[i] == 0 || !answers[i].empty()) continue;
      // One answer serves everybody who has asked before it was given.
      const std::uint64_t about = slot_of(i).standing.about();
      if (about >= questions[i]) answers[i] = slot_of(i).standing.load(about);
      open = open || answers[i].empty();
    }
    if (deadline.expired()) break;
    if (open) ::usleep(1000);
  }
  return answers;
}

std::uint32_t Answerer::next() {
  slot_.listening.store(1, std::memory_order_release);
  while (!stopped_.load(std::memory_order_acquire)) {
    const std::uint32_t question = slot_.question.load(std::memory_order_acquire);
    if (question != answered_) return question;
    futex_wait(slot_.question, question, an_hour_ns);
  }
  slot_.listening.store(0, std::memory_order_release);
  return 0;
}

void Answerer::answer(std::uint32_t question, const std::string& text) {
  answered_ = question;
  slot_.standing.store(question, text.empty() ? "unknown" : text);
}

void Answerer::stop() {
  stopped_.store(true, std::memory_order_release);
  // Changing the word keeps a listener that is about to sleep from doing so.
  slot_.question.fetch_add(1, std::memory_order_acq_rel);
  futex_wake_all(slot_.question);
}

}  // namespace gradsync
