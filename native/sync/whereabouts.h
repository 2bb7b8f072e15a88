// Where a rank's program stands, asked by a peer that has waited for it in vain. The rank's answer
// comes from a thread that sleeps on the `question` word of its slot and nothing else, so being
// asked costs a rank nothing until it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "sync/slots.h"

namespace gradsync {

// The side that asks. Questions go through the memory of a world, the only one where threads
// listen; the ranks of a sub-group have other numbers there.
class Whereabouts {
 public:
  Whereabouts() = default;
  // `places[r]`: the rank in the world of rank r. `memory` keeps the slots mapped.
  Whereabouts(std::shared_ptr<const void> memory, Slot* slots, std::vector<int> places)
      : memory_(std::move(memory)), slots_(slots), places_(std::move(places)) {}

  // The same for a group of some of these ranks.
  Whereabouts of(const std::vector<int>& ranks) const;
  // Asks all of `ranks` and waits for their answers, which are empty where none came in time.
  std::vector<std::string> ask(const std::vector<int>& ranks, Deadline deadline) const;

 private:
  std::shared_ptr<const void> memory_;
  Slot* slots_ = nullptr;
  std::vector<int> places_;
};

// The side that answers: a rank's listening thread.
class Answerer {
 public:
  explicit Answerer(Slot& slot) : slot_(slot) {}

  // Waits for a question and returns its number, 0 when there will be no more.
  std::uint32_t next();
  void answer(std::uint32_t question, const std::string& text);
  // Ends the wait, for good.
  void stop();

 private:
  Slot& slot_;
  std::uint32_t answered_ = 0;
  std::atomic<bool> stopped_{false};
};

}  // namespace gradsync
