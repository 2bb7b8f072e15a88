// A group on one host: its memory, its team, and the calls that run on it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "algo/algorithm.h"
#include "algo/board.h"
#include "common/fork.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "p2p/mailbox.h"
#include "session/queue.h"
#include "sync/team.h"
#include "sync/whereabouts.h"

namespace gradsync {

class Session {
 public:
  // Memory for a session of so many ranks, ready to be entered. `open`: ranks that are threads read
  // each other's memory, as processes do.
  static Status make_memory(int ranks, std::size_t staging_bytes, bool open, Segment& out);

  // Over memory that is mapped already.
  Session(std::shared_ptr<Segment> segment, std::shared_ptr<Arena> arena, int arena_rank, int rank,
          int ranks, Liveness liveness);
  Status enter(Deadline deadline) {
    const Status status = team_.enter(deadline);
    queue_.set_share_of_cores(team_.cores_each());
    return status;
  }
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const { return team_.rank(); }
  int size() const { return team_.size(); }
  // Calls that this rank has announced; and the number of the last one it made, announced or not.
  std::uint64_t sequence() const { return team_.sequence(); }
  std::uint64_t call() const { return team_.call(); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  // Whether its ranks read each other's memory, where that saves a copy.
  bool reads_directly() { return team_.is_open(); }
  // The rank in the world, whose range of the arena is ours.
  int arena_rank() const { return arena_rank_; }

  Status barrier(Deadline deadline);
  Status broadcast(std::byte* data, std::size_t count, Dtype dtype, int root, Deadline deadline);
  Status all_reduce(std::byte* data, std::size_t count, Dtype dtype, Reduce reduce,
                    Deadline deadline);
  // See algo/algorithm.h. Lists have one entry per rank; gather's outputs and scatter's inputs only
  // on the root.
  Status reduce(std::byte* data, std::size_t count, Dtype dtype, Reduce reduce, int root,
                Deadline deadline);
  Status all_gather(const std::byte* input, std::size_t count, Dtype dtype,
                    std::span<std::byte* const> outputs, Deadline deadline);
  Status all_gather_uneven(const std::byte* input, const Pieces<std::byte>& outputs, Dtype dtype,
                           Deadline deadline);
  Status gather(const std::byte* input, std::size_t count, Dtype dtype,
                std::span<std::byte* const> outputs, int root, Deadline deadline);
  Status scatter(std::span<const std::byte* const> inputs, std::byte* output, std::size_t count,
                 Dtype dtype, int root, Deadline deadline);
  Status reduce_scatter(std::span<const std::byte* const> inputs,
                        std::span<const std::size_t> counts, std::byte* output, Dtype dtype,
                        Reduce reduce, Deadline deadline);
  Status all_to_all(const Pieces<const std::byte>& inputs, const Pieces<std::byte>& outputs,
                    Dtype dtype, Deadline deadline);

  // Messages between two ranks, in any order with regard to the calls above.
  Mailbox& mail() { return mail_; }

  // A board over buckets in the arena, the same on all ranks; see algo/board.h. A collective.
  Status make_board(std::span<std::byte* const> buckets, std::vector<BucketShape> shapes,
                    Deadline deadline, std::unique_ptr<Board>& out);
  Status finish(Board& board, Deadline deadline);

  // Hands in a call (one of the above) to be carried out after those before it.
  std::shared_ptr<Ticket> post(Queue::Call call);
  Status wait(Ticket& ticket, Deadline deadline) { return queue_.wait(ticket, deadline); }
  void hurry() {
    if (is_ours()) queue_.hurry();
  }
  // Gives calls that were handed in until the deadline to end by themselves, ends the others, and
  // leaves. Later calls fail.
  void close(Deadline deadline);

  // These may be called while another thread is inside a call.
  void abort(const std::string& reason) { team_.abort(reason); }
  void leave(const std::string& note) {
    if (is_ours()) team_.leave(note);
  }
  std::vector<RankReport> report() const;

  // The group's name, for messages.
  const std::string& name() const { return team_.name(); }
  void set_name(const std::string& name) { team_.set_name(name); }
  const std::vector<int>& places() const { return team_.places(); }
  void set_places(std::vector<int> places) { team_.set_places(std::move(places)); }
  // What every rank was doing when a call failed, as far as they could still say; the present state
  // when none has.
  std::vector<RankReport> findings() const;
  // Why a rank went, if something was wrong; empty as long as it has not said so.
  std::string last_words(int rank) const { return team_.last_words(rank); }
  // Where the programs of these ranks stand, by their own words or the system's; empty where
  // neither can be had.
  std::vector<std::string> ask(const std::vector<int>& ranks, Deadline deadline) const;
  // For a sub-group: questions go through its world, where its ranks are `places`.
  void ask_through(const Session& world, const std::vector<int>& places);
  // For the thread that answers a world's questions. The number of the next one, 0 at the end.
  std::uint32_t next_question() { return answerer_.next(); }
  void answer(std::uint32_t question, const std::string& text) { answerer_.answer(question, text); }
  void stop_answering() {
    if (is_ours()) answerer_.stop();
  }

 private:
  // False in a forked child, which must neither use the group nor say goodbye in its parent's name.
  bool is_ours() const { return fork_generation() == opened_in_; }

  // Runs one call after the other. A failed one breaks the group: the ranks no longer agree on what
  // comes next, so every later call fails with the same status.
  template <typename Call>
  Status run(Deadline deadline, Call call);
  template <typename Call>
  Status guarded(Deadline deadline, Call& call);
  Status not_ours() const;
  // A rank takes its staging space before its first call: zeroing it takes 0.15 ms a MiB, and a
  // group that sends messages only, or none at all, needs none. Nobody touches another's space
  // before that one has announced a call.
  Status reserve_staging();

  // Finds out what the others are doing, before the failure of a call is reported.
  void look_into(const Status& status);

  Status check_root(int root) const;
  // A list with an entry for each rank, or an empty one where the rank needs none.
  Status check_list(const char* what, std::size_t entries, bool needed = true) const;

  std::shared_ptr<Segment> segment_;
  std::shared_ptr<Arena> arena_;
  int arena_rank_;
  Team team_;
  Staging staging_;
  Answerer answerer_;
  Whereabouts whereabouts_;
  mutable std::mutex findings_mutex_;  // threads whose calls did not get their turn read them, too
  std::vector<RankReport> findings_;
  std::uint64_t opened_in_ = fork_generation();
  std::uint32_t boards_ = 0;  // made so far
  Status broken_;             // written and read by whoever has the turn
  bool has_staging_ = false;  // likewise
  Queue queue_;
  Mailbox mail_;
};

}  // namespace gradsync
