// Each collective with data that tells where every element came from, checked to the last one.
#pragma once

#include <random>
#include <vector>

#include "tests/ranks.h"

namespace gradsync::testing {

using Floats = std::vector<float>;

inline std::byte* bytes(Floats& data) { return reinterpret_cast<std::byte*>(data.data()); }
inline const std::byte* bytes(const Floats& data) {
  return reinterpret_cast<const std::byte*>(data.data());
}

inline Deadline soon() { return Deadline::after(30); }

// Element i of what `rank` has for `piece`.
inline float value(int rank, std::size_t i, int piece = 0) {
  return static_cast<float>((rank + 1) * 3 + piece * 1000) + static_cast<float>(i % 101);
}

inline Floats filled(int rank, std::size_t count, int piece = 0) {
  Floats data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(rank, i, piece);
  return data;
}

inline Floats summed(int ranks, std::size_t count, int piece = 0) {
  Floats data(count);
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) data[i] += value(rank, i, piece);
  }
  return data;
}

// One tensor per rank and the list of their addresses.
struct List {
  std::vector<Floats> tensors;
  std::vector<std::size_t> counts;

  static List empty(const std::vector<std::size_t>& counts) {
    List list{{}, counts};
    for (const std::size_t count : counts) list.tensors.emplace_back(count, -1.0F);
    return list;
  }
  // What `rank` has for each.
  static List of(int rank, const std::vector<std::size_t>& counts) {
    List list{{}, counts};
    for (std::size_t piece = 0; piece < counts.size(); ++piece) {
      list.tensors.push_back(filled(rank, counts[piece], static_cast<int>(piece)));
    }
    return list;
  }
  std::vector<std::byte*> outputs() {
    std::vector<std::byte*> all;
    for (Floats& tensor : tensors) all.push_back(bytes(tensor));
    return all;
  }
  std::vector<const std::byte*> inputs() const {
    std::vector<const std::byte*> all;
    for (const Floats& tensor : tensors) all.push_back(bytes(tensor));
    return all;
  }
};

inline std::vector<std::size_t> evenly(const Session& session, std::size_t count) {
  return std::vector<std::size_t>(static_cast<std::size_t>(session.size()), count);
}

inline void check_all_reduce(Session& session, std::size_t count) {
  Floats data = filled(session.rank(), count);
  CHECK_OK(session.all_reduce(bytes(data), count, Dtype::f32, Reduce::sum, soon()));
  CHECK(data == summed(session.size(), count));
}

inline void check_broadcast(Session& session, std::size_t count, int root) {
  Floats data = filled(session.rank(), count);
  CHECK_OK(session.broadcast(bytes(data), count, Dtype::f32, root, soon()));
  CHECK(data == filled(root, count));
}

inline void check_reduce(Session& session, std::size_t count, int root) {
  Floats data = filled(session.rank(), count);
  CHECK_OK(session.reduce(bytes(data), count, Dtype::f32, Reduce::sum, root, soon()));
  CHECK(data ==
        (session.rank() == root ? summed(session.size(), count) : filled(session.rank(), count)));
}

inline void check_all_gather(Session& session, std::size_t count, bool in_place) {
  const Floats input = filled(session.rank(), count);
  List outputs = List::empty(evenly(session, count));
  const auto own = static_cast<std::size_t>(session.rank());
  if (in_place) outputs.tensors[own] = input;
  const auto addresses = outputs.outputs();
  CHECK_OK(session.all_gather(in_place ? addresses[own] : bytes(input), count, Dtype::f32,
                              addresses, soon()));
  for (int rank = 0; rank < session.size(); ++rank) {
    CHECK(outputs.tensors[static_cast<std::size_t>(rank)] == filled(rank, count));
  }
}

// counts[rank] elements from each rank.
inline void check_all_gather_uneven(Session& session, const std::vector<std::size_t>& counts,
                                    bool in_place) {
  const auto own = static_cast<std::size_t>(session.rank());
  const Floats input = filled(session.rank(), counts[own]);
  List outputs = List::empty(counts);
  if (in_place) outputs.tensors[own] = input;
  const auto addresses = outputs.outputs();
  CHECK_OK(session.all_gather_uneven(in_place ? addresses[own] : bytes(input), {addresses, counts},
                                     Dtype::f32, soon()));
  for (int rank = 0; rank < session.size(); ++rank) {
    const auto piece = static_cast<std::size_t>(rank);
    CHECK(outputs.tensors[piece] == filled(rank, counts[piece]));
  }
}

inline void check_gather(Session& session, std::size_t count, int root) {
  const Floats input = filled(session.rank(), count);
  List outputs;
  if (session.rank() == root) outputs = List::empty(evenly(session, count));
  CHECK_OK(session.gather(bytes(input), count, Dtype::f32, outputs.outputs(), root, soon()));
  for (std::size_t rank = 0; rank < outputs.tensors.size(); ++rank) {
    CHECK(outputs.tensors[rank] == filled(static_cast<int>(rank), count));
  }
}

inline void check_scatter(Session& session, std::size_t count, int root) {
  List inputs;
  if (session.rank() == root) inputs = List::of(root, evenly(session, count));
  Floats output(count, -1.0F);
  CHECK_OK(session.scatter(inputs.inputs(), bytes(output), count, Dtype::f32, root, soon()));
  CHECK(output == filled(root, count, session.rank()));
}

inline void check_reduce_scatter(Session& session, const std::vector<std::size_t>& counts,
                                 bool in_place) {
  List inputs = List::of(session.rank(), counts);
  const auto own = static_cast<std::size_t>(session.rank());
  Floats output(counts[own], -1.0F);
  CHECK_OK(session.reduce_scatter(inputs.inputs(), counts,
                                  in_place ? inputs.outputs()[own] : bytes(output), Dtype::f32,
                                  Reduce::sum, soon()));
  CHECK((in_place ? inputs.tensors[own] : output) ==
        summed(session.size(), counts[own], session.rank()));
}

// matrix[from * ranks + to] elements go from one to the other.
inline void check_all_to_all(Session& session, const std::vector<std::size_t>& matrix) {
  const auto ranks = static_cast<std::size_t>(session.size());
  const auto own = static_cast<std::size_t>(session.rank());
  std::vector<std::size_t> sent, received;
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    sent.push_back(matrix[own * ranks + peer]);
    received.push_back(matrix[peer * ranks + own]);
  }
  const List inputs = List::of(session.rank(), sent);
  List outputs = List::empty(received);
  const auto from = inputs.inputs();
  const auto to = outputs.outputs();
  CHECK_OK(session.all_to_all({from, sent}, {to, received}, Dtype::f32, soon()));
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    CHECK(outputs.tensors[peer] == filled(static_cast<int>(peer), received[peer], session.rank()));
  }
}

// Any call, of a size up to `most`, as the random numbers say, which are the same on every rank.
inline void check_random_call(Session& session, std::mt19937& random, std::size_t most) {
  const auto ranks = static_cast<std::size_t>(session.size());
  const auto size = [&] { return random() % 8 == 0 ? random() % 3 : random() % (most + 1); };
  const auto some = [&](std::size_t entries) {
    std::vector<std::size_t> counts(entries);
    for (std::size_t& count : counts) count = size();
    return counts;
  };
  const std::size_t count = size();
  const int root = static_cast<int>(random() % ranks);
  const bool flag = random() % 2 == 0;
  switch (random() % 11) {
    case 0: CHECK_OK(session.barrier(soon())); break;
    case 1: check_broadcast(session, count, root); break;
    case 2: check_all_reduce(session, count); break;
    case 3: check_reduce(session, count, root); break;
    case 4: check_all_gather(session, count, flag); break;
    case 5: check_gather(session, count, root); break;
    case 6: check_scatter(session, count, root); break;
    case 7: check_reduce_scatter(session, evenly(session, count), flag); break;
    case 8: check_reduce_scatter(session, some(ranks), flag); break;
    case 9: check_all_gather_uneven(session, some(ranks), flag); break;
    default: check_all_to_all(session, some(ranks * ranks));
  }
}

}  // namespace gradsync::testing
