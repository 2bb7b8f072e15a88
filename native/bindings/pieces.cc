// The calls with one address per rank; Python passes sequences of integers.
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings/session.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::size_t>;

template <typename Byte>
std::vector<Byte*> pointers(const Addresses& addresses) {
  std::vector<Byte*> all;
  all.reserve(addresses.size());
  for (const std::uintptr_t address : addresses) all.push_back(at(address));
  return all;
}

void call_all_gather(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                     const Addresses& outputs, double timeout_s) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto to = pointers<std::byte>(outputs);
  run_released(
      [&] { return self.all_gather(at(address), count, type, to, Deadline::after(timeout_s)); });
}

void call_all_gather_uneven(Session& self, std::uintptr_t address, const Addresses& outputs,
                            const Counts& counts, int dtype, double timeout_s) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto to = pointers<std::byte>(outputs);
  run_released([&] {
    return self.all_gather_uneven(at(address), {to, counts}, type, Deadline::after(timeout_s));
  });
}

void call_gather(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                 const Addresses& outputs, int root, double timeout_s) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto to = pointers<std::byte>(outputs);
  run_released(
      [&] { return self.gather(at(address), count, type, to, root, Deadline::after(timeout_s)); });
}

void call_scatter(Session& self, const Addresses& inputs, std::uintptr_t address, std::size_t count,
                  int dtype, int root, double timeout_s) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto from = pointers<const std::byte>(inputs);
  run_released([&] {
    return self.scatter(from, at(address), count, type, root, Deadline::after(timeout_s));
  });
}

void call_reduce_scatter(Session& self, const Addresses& inputs, const Counts& counts,
                         std::uintptr_t address, int dtype, int reduce, double timeout_s) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto operation = checked<Reduce>(reduce, "reduce operation");
  const auto from = pointers<const std::byte>(inputs);
  run_released([&] {
    return self.reduce_scatter(from, counts, at(address), type, operation,
                               Deadline::after(timeout_s));
  });
}

void call_all_to_all(Session& self, const Addresses& inputs, const Counts& input_counts,
                     const Addresses& outputs, const Counts& output_counts, int dtype,
                     double timeout_s) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto from = pointers<const std::byte>(inputs);
  const auto to = pointers<std::byte>(outputs);
  run_released([&] {
    return self.all_to_all({from, input_counts}, {to, output_counts}, type,
                           Deadline::after(timeout_s));
  });
}

}  // namespace

void bind_piece_calls(nb::class_<Session>& session) {
  session.def("all_gather", &call_all_gather, nb::arg("address"), nb::arg("count"),
              nb::arg("dtype"), nb::arg("outputs"), nb::arg("timeout_s"));
  session.def("all_gather_uneven", &call_all_gather_uneven, nb::arg("address"), nb::arg("outputs"),
              nb::arg("counts"), nb::arg("dtype"), nb::arg("timeout_s"));
  session.def("gather", &call_gather, nb::arg("address"), nb::arg("count"), nb::arg("dtype"),
              nb::arg("outputs"), nb::arg("root"), nb::arg("timeout_s"));
  session.def("scatter", &call_scatter, nb::arg("inputs"), nb::arg("address"), nb::arg("count"),
              nb::arg("dtype"), nb::arg("root"), nb::arg("timeout_s"));
  session.def("reduce_scatter", &call_reduce_scatter, nb::arg("inputs"), nb::arg("counts"),
              nb::arg("address"), nb::arg("dtype"), nb::arg("reduce"), nb::arg("timeout_s"));
  session.def("all_to_all", &call_all_to_all, nb::arg("inputs"), nb::arg("input_counts"),
              nb::arg("outputs"), nb::arg("output_counts"), nb::arg("dtype"), nb::arg("timeout_s"));
}

}  // namespace gradsync
