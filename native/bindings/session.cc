// A group's session as Python sees it: what runs its calls. Tensors come as addresses and counts;
// whoever calls keeps them alive.
#include "bindings/session.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "common/cgroup.h"
#include "common/cores.h"
#include "common/freed_memory.h"
#include "session/founding.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

nb::list local_sessions(int ranks, std::size_t staging_bytes,
                        const std::vector<const Session*>& worlds) {
  if (!worlds.empty() && worlds.size() != static_cast<std::size_t>(ranks)) {
    raise_if_failed(Status::error(Code::invalid,
                                  "a sub-group needs a session in the world for "
                                  "each of its ranks"));
  }
  std::vector<std::unique_ptr<Session>> sessions;
  run_released([&] { return found_local(ranks, staging_bytes, worlds, sessions); });
  nb::list all;
  for (auto& session : sessions) all.append(nb::cast(std::move(session)));
  return all;
}

// Shared memory that lives as long as the array; the group may end before it.
nb::ndarray<std::uint8_t, nb::ndim<1>> allocate(Session& session, std::size_t bytes) {
  struct Block {
    std::shared_ptr<Arena> arena;
    std::byte* data;
  };
  std::byte* data = nullptr;
  run_released([&] { return session.arena()->allocate(session.arena_rank(), bytes, data); });
  const nb::capsule owner(new Block{session.arena(), data}, [](void* pointer) noexcept {
    const std::unique_ptr<Block> block(static_cast<Block*>(pointer));
    block->arena->free(block->data);
  });
  return nb::ndarray<std::uint8_t, nb::ndim<1>>(data, {bytes}, owner);
}

nb::list rows_of(const std::vector<RankReport>& reports) {
  nb::list rows;
  for (const RankReport& rank : reports) {
    rows.append(nb::make_tuple(rank.pid, static_cast<int>(rank.presence), rank.last.sequence,
                               rank.last.what, rank.last.count, rank.last.time_ns, rank.site_of,
                               rank.site, rank.standing));
  }
  return rows;
}

void bind_questions(nb::class_<Session>& session) {
  session
      .def(
          "ask",
          [](const Session& self, const std::vector<int>& ranks, double timeout_s) {
            const Unlocked unlocked;
            return self.ask(ranks, Deadline::after(timeout_s));
          },
          nb::arg("ranks"), nb::arg("timeout_s"))
      .def("ask_through", &Session::ask_through, nb::arg("world"), nb::arg("places"));
}

nb::object call_barrier(Session& self, double timeout_s, bool asynchronous) {
  return dispatch(self, timeout_s, asynchronous,
                  [&self](Deadline deadline) { return self.barrier(deadline); });
}

nb::object call_broadcast(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                          int root, double timeout_s, bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  return dispatch(self, timeout_s, asynchronous, [=, &self](Deadline deadline) {
    return self.broadcast(at(address), count, type, root, deadline);
  });
}

nb::object call_reduce(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                       int reduce, int root, double timeout_s, bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto operation = checked<Reduce>(reduce, "reduce operation");
  return dispatch(self, timeout_s, asynchronous, [=, &self](Deadline deadline) {
    return self.reduce(at(address), count, type, operation, root, deadline);
  });
}

nb::object call_all_reduce(Session& self, std::uintptr_t address, std::size_t count, int dtype,
                           int reduce, double timeout_s, bool asynchronous) {
  const auto type = checked<Dtype>(dtype, "dtype");
  const auto operation = checked<Reduce>(reduce, "reduce operation");
  return dispatch(self, timeout_s, asynchronous, [=, &self](Deadline deadline) {
    return self.all_reduce(at(address), count, type, operation, deadline);
  });
}

// `asynchronous` makes a call return a Pending, which keeps the session alive.
void bind_calls(nb::class_<Session>& session) {
  session.def(
      "enter",
      [](Session& self, double timeout_s) {
        run_released([&] { return self.enter(Deadline::after(timeout_s)); });
      },
      nb::arg("timeout_s"));
  session.def(
      "close",
      [](Session& self, double timeout_s) {
        {
          const Unlocked unlocked;
          self.close(Deadline::after(timeout_s));
        }
        if (PyErr_Occurred() != nullptr) throw nb::python_error();  // a signal cut the wait short
      },
      nb::arg("timeout_s"));
  session.def("barrier", &call_barrier, nb::arg("timeout_s"), nb::arg("asynchronous") = false,
              nb::keep_alive<0, 1>());
  session.def("broadcast", &call_broadcast, nb::arg("address"), nb::arg("count"), nb::arg("dtype"),
              nb::arg("root"), nb::arg("timeout_s"), nb::arg("asynchronous") = false,
              nb::keep_alive<0, 1>());
  session.def("reduce", &call_reduce, nb::arg("address"), nb::arg("count"), nb::arg("dtype"),
              nb::arg("reduce"), nb::arg("root"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
  session.def("all_reduce", &call_all_reduce, nb::arg("address"), nb::arg("count"),
              nb::arg("dtype"), nb::arg("reduce"), nb::arg("timeout_s"),
              nb::arg("asynchronous") = false, nb::keep_alive<0, 1>());
}

}  // namespace

void bind_session(nb::module_& module) {
  nb::class_<Session> session(module, "Session");
  session.def_prop_ro("rank", &Session::rank)
      .def_prop_ro("size", &Session::size)
      .def_prop_ro("sequence", &Session::sequence)
      .def_prop_ro("call", &Session::call)
      .def("abort", &Session::abort, nb::arg("reason"))
      .def("leave", &Session::leave, nb::arg("note"))
      .def_prop_rw("name", &Session::name, &Session::set_name)
      .def_prop_rw("places", &Session::places, &Session::set_places)
      .def("allocate", &allocate, nb::arg("nbytes"))
      .def(
          "is_shared",
          [](const Session& self, std::uintptr_t address, std::size_t bytes) {
            return self.arena()->place_of(at(address), bytes) != 0;
          },
          nb::arg("address"), nb::arg("nbytes"))
      .def("last_words", &Session::last_words, nb::arg("rank"))
      .def("report", [](const Session& self) { return rows_of(self.report()); })
      .def("findings", [](const Session& self) { return rows_of(self.findings()); });
  bind_questions(session);
  bind_pending(module);
  bind_calls(session);
  bind_piece_calls(session);
  bind_mail(module, session);
  bind_board(module, session);
  bind_adoption(module, session);
  module.def("local_sessions", &local_sessions, nb::arg("ranks"), nb::arg("staging_bytes"),
             nb::arg("worlds") = std::vector<const Session*>());
  module.def("keep_freed_memory", &keep_freed_memory);
  module.def("usable_cores", [] { return usable_cores(affinity_mask(), cgroup_cpus()); });
}

}  // namespace gradsync
