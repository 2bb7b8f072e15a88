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

nb::object call_all_gather(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                           const Addresses& outputs, double timeout_s, bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  return dispatch(self, timeout_s, asynchronous,
                  [=, &self, to = pointers<std::byte>(outputs)](Deadline deadline) {
                    return self.all_gather(at(address), count, type, to, deadline);
                  });
}

nb::object call_all_gather_uneven(Session& self, std::uintptr_t address, const Addresses& outputs,
                                  const Counts& counts, int dtype, double timeout_s,
                                  bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  return dispatch(self, timeout_s, asynchronous,
                  [=, &self, to = pointers<std::byte>(outputs)](Deadline deadline) {
                    return self.all_gather_uneven(at(address), {to, counts}, type, deadline);
                  });
}

nb::object call_gather(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                       const Addresses& outputs, int root, double timeout_s, bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  return dispatch(self, timeout_s, asynchronous,
                  [=, &self, to = pointers<std::byte>(outputs)](Deadline deadline) {
                    return self.gather(at(address), count, type, to, root, deadline);
                  });
}

nb::object call_scatter(Session& self, const Addresses& inputs, std::uintptr_t address,
                        std::size_t count, int dtype, int root, double timeout_s,
                        bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  return dispatch(self, timeout_s, asynchronous,
                  [=, &self, from = pointers<const std::byte>(inputs)](Deadline deadline) {
                    return self.scatter(from, at(address), count, type, root, deadline);
                  });
}

nb::object call_reduce_scatter(Session& self, const Addresses& inputs, const Counts& counts,
                               std::uintptr_t address, int dtype, int reduce, double timeout_s,
                               bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto operation = checked<Reduce>(reduce, "reduce operation");
  return dispatch(self, timeout_s, asynchronous,
                  [=, &self, from = pointers<const std::byte>(inputs)](Deadline deadline) {
                    return self.reduce_scatter(from, counts, at(address), type, operation,
                                               deadline);
                  });
}

nb::object call_all_to_all(Session& self, const Addresses& inputs, const Counts& input_counts,
                           const Addresses& outputs, const Counts& output_counts, int dtype,
                           double timeout_s, bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  return dispatch(self, timeout_s, asynchronous,
                  [=, &self, from = pointers<const std::byte>(inputs),
                   to = pointers<std::byte>(outputs)](Deadline deadline) {
                    return self.all_to_all({from, input_counts}, {to, output_counts}, type,
                                           deadline);
                  });
}

}  // namespace

void bind_piece_calls(nb::class_<Session>& session) {
  session.def("all_gather", &call_all_gather, nb::arg("address"), nb::arg("count"),
              nb::arg("dtype"), nb::arg("outputs"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
  session.def("all_gather_uneven", &call_all_gather_uneven, nb::arg("address"), nb::arg("outputs"),
              nb::arg("counts"), nb::arg("dtype"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
  session.def("gather", &call_gather, nb::arg("address"), nb::arg("count"), nb::arg("dtype"),
              nb::arg("outputs"), nb::arg("root"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
  session.def("scatter", &call_scatter, nb::arg("inputs"), nb::arg("address"), nb::arg("count"),
              nb::arg("dtype"), nb::arg("root"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
  session.def("reduce_scatter", &call_reduce_scatter, nb::arg("inputs"), nb::arg("counts"),
              nb::arg("address"), nb::arg("dtype"), nb::arg("reduce"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
  session.def("all_to_all", &call_all_to_all, nb::arg("inputs"), nb::arg("input_counts"),
              nb::arg("outputs"), nb::arg("output_counts"), nb::arg("dtype"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
}

}  // namespace gradsync
