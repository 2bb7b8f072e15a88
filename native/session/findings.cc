// After a call has failed: what every rank was doing, gathered while it can still be asked.
#include <algorithm>
#include <utility>

#include "session/session.h"

namespace gradsync {
namespace {

// The others notice a mismatch when we do, and a peer's death or a time-out within one look around.
constexpr double for_mismatch_s = 0.2;
constexpr double for_timeout_s = 0.3;
constexpr double for_lost_s = 0.05;

}  // namespace

void Session::look_into(const Status& status) {
  if (status.code == Code::interrupted) return;  // the user wants to go, and knows why
  team_.publish_site();
  const auto is_blamed = [&](int rank) {
    return std::find(status.ranks.begin(), status.ranks.end(), rank) != status.ranks.end();
  };
  std::vector<int> here;  // those that are in this call, too
  for (int rank = 0; rank < size(); ++rank) {
    const bool announced = team_.report(rank).last.sequence == team_.call();
    if (announced && (status.code == Code::mismatch || !is_blamed(rank))) here.push_back(rank);
  }
  std::vector<std::string> answers(status.ranks.size());
  if (status.code == Code::mismatch) {
    team_.await_sites(here, Deadline::after(for_mismatch_s));
  } else if (status.code == Code::peer_lost) {
    team_.await_sites(here, Deadline::after(for_lost_s));
  } else if (status.code == Code::timeout) {
    const Deadline deadline = Deadline::after(for_timeout_s);
    answers = ask(status.ranks, deadline);
    team_.await_sites(here, deadline);
  }
  std::vector<RankReport> found = report();
  for (std::size_t i = 0; i < answers.size() && status.code == Code::timeout; ++i) {
    found[static_cast<std::size_t>(status.ranks[i])].standing = answers[i];
  }
  const std::scoped_lock lock(findings_mutex_);
  findings_ = std::move(found);
}

std::vector<RankReport> Session::findings() const {
  const std::scoped_lock lock(findings_mutex_);
  return findings_.empty() ? report() : findings_;
}

std::vector<std::string> Session::ask(const std::vector<int>& ranks, Deadline deadline) const {
  std::vector<std::string> answers = whereabouts_.ask(ranks, deadline);
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].empty()) continue;
    const std::string doing = team_.liveness().what_it_does(ranks[i]);
    if (!doing.empty()) answers[i] = "it does not answer: its process is " + doing;
  }
  return answers;
}

void Session::ask_through(const Session& world, const std::vector<int>& places) {
  whereabouts_ = world.whereabouts_.of(places);
}

}  // namespace gradsync
