// The board of gradient buckets, as Python sees it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "bindings/session.h"
#include "bindings/tensors.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

// Refers to its session, which the Python object keeps alive.
struct BoundBoard {
  Session* session;
  std::unique_ptr<Board> board;
  TensorReader reader;
};

// (address, count, dtype, parts) of a bucket.
using Bucket = std::tuple<std::uintptr_t, std::size_t, int, std::size_t>;

std::unique_ptr<BoundBoard> make_board(Session& session, const std::vector<Bucket>& buckets,
                                       double timeout_s) {
  std::vector<std::byte*> data;
  std::vector<BucketShape> shapes;
  for (const auto& [address, count, dtype, parts] : buckets) {
    data.push_back(at(address));
    shapes.push_back({count, checked<Dtype>(dtype, "dtype"), parts});
  }
  auto bound = std::make_unique<BoundBoard>();
  bound->session = &session;
  run_released([&] {
    return session.make_board(data, std::move(shapes), Deadline::after(timeout_s), bound->board);
  });
  return bound;
}

void arrive(BoundBoard& self, std::size_t bucket, double weight, const nb::object& missing) {
  std::span<const std::uint8_t> flags;
  if (!missing.is_none()) {
    const auto bytes = nb::cast<nb::bytes>(missing);
    flags = {reinterpret_cast<const std::uint8_t*>(bytes.c_str()), bytes.size()};
  }
  run_released([&] { return self.board->arrive(bucket, weight, flags); });
}

// Like arrive(), with gradients that are not in the bucket; `keep`: they stay where they are.
// False, and nothing done, unless they are plain tensors that make up the bucket.
bool lend(BoundBoard& self, std::size_t bucket, double weight, const nb::list& gradients,
          bool keep) {
  if (bucket >= self.board->size()) return false;
  const BucketShape& shape = self.board->shape(bucket);
  std::vector<LentPart> parts;
  parts.reserve(gradients.size());
  std::size_t count = 0;
  for (const nb::handle gradient : gradients) {
    PlainTensor plain;
    if (!self.reader.read(gradient, plain) || plain.dtype != shape.dtype) return false;
    parts.push_back({plain.data, plain.count});
    count += plain.count;
  }
  if (count != shape.count) return false;
  run_released([&] { return self.board->arrive(bucket, weight, {}, parts, keep); });
  return true;
}

}  // namespace

void bind_board(nb::module_& module, nb::class_<Session>& session) {
  nb::class_<BoundBoard>(module, "Board")
      .def("arrive", &arrive, nb::arg("bucket"), nb::arg("weight"), nb::arg("missing").none())
      .def("lend", &lend, nb::arg("bucket"), nb::arg("weight"), nb::arg("gradients"),
           nb::arg("keep"))
      .def(
          "lend_tensors",
          [](BoundBoard& self, nb::type_object type, const nb::capsule& table) {
            self.reader = TensorReader(std::move(type), table);
          },
          nb::arg("tensor_type"), nb::arg("exchange_table"))
      .def("reduced", [](const BoundBoard& self) { return self.board->reduced(); })
      .def("poll",
           [](BoundBoard& self) {
             const Unlocked unlocked;
             self.board->advance();
           })
      .def(
          "finish",
          [](BoundBoard& self, double timeout_s) {
            run_released(
                [&] { return self.session->finish(*self.board, Deadline::after(timeout_s)); });
          },
          nb::arg("timeout_s"))
      .def(
          "missing_everywhere",
          [](const BoundBoard& self, std::size_t bucket) {
            return self.board->missing_everywhere(bucket);
          },
          nb::arg("bucket"));
  session.def("make_board", &make_board, nb::arg("buckets"), nb::arg("timeout_s"),
              nb::keep_alive<0, 1>());
}

}  // namespace gradsync
