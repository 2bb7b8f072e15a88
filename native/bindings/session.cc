// The shared-memory core as Python sees it: a founder to meet at, a link to reach one, a session to
// run calls on. Tensors come as addresses and counts; whoever calls keeps them alive.
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

class FounderHandle {
 public:
  FounderHandle() { raise_if_failed(Founder::open(founder_)); }

  std::string name() const { return founder_.lobby().name(); }
  nb::bytes secret() const {
    const Secret& secret = founder_.lobby().secret();
    return nb::bytes(secret.data(), secret.size());
  }

  void prepare(int ranks, std::size_t staging_bytes, const Session* world) {
    const Unlocked unlocked;
    founder_.prepare(ranks, staging_bytes, world);
  }

  // The ranks that have not come yet.
  std::vector<int> gather(const std::vector<int>& pids, double timeout_s) {
    const Status status =
        released([&] { return founder_.gather(pids, Deadline::after(timeout_s)); });
    if (status.code != Code::timeout) raise_if_failed(status);
    return status.ranks;
  }

  void turn_away(const std::string& why, const std::vector<int>& ranks, bool lost) {
    const Unlocked unlocked;
    founder_.turn_away(Status::error(lost ? Code::peer_lost : Code::timeout, why, ranks));
  }

  std::unique_ptr<Session> found(double timeout_s, const Session* world) {
    std::unique_ptr<Session> session;
    run_released([&] { return founder_.found(world, Deadline::after(timeout_s), session); });
    return session;
  }

 private:
  Founder founder_;
};

class Link {
 public:
  explicit Link(const std::string& name) { raise_if_failed(reach_lobby(name, socket_)); }

  std::unique_ptr<Session> join(const nb::bytes& secret, int rank, int ranks, double timeout_s,
                                const Session* world) {
    Secret key{};
    if (secret.size() != key.size()) {
      raise_if_failed(Status::error(
          Code::invalid, "a lobby's secret has 16 bytes, not " + std::to_string(secret.size())));
    }
    std::memcpy(key.data(), secret.c_str(), key.size());
    std::unique_ptr<Session> session;
    run_released([&] {
      return join_founder(std::move(socket_), key, rank, ranks, world, Deadline::after(timeout_s),
                          session);
    });
    return session;
  }

 private:
  Fd socket_;
};

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
      .def("ask_through", &Session::ask_through, nb::arg("world"), nb::arg("places"))
      .def("next_question",
           [](Session& self) {
             const Unlocked unlocked;
             return self.next_question();
           })
      .def("answer", &Session::answer, nb::arg("question"), nb::arg("text"))
      .def("stop_answering", &Session::stop_answering);
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
  nb::class_<FounderHandle>(module, "Founder")
      .def(nb::init<>())
      .def_prop_ro("name", &FounderHandle::name)
      .def_prop_ro("secret", &FounderHandle::secret)
      .def("prepare", &FounderHandle::prepare, nb::arg("ranks"), nb::arg("staging_bytes"),
           nb::arg("world") = nb::none())
      .def("gather", &FounderHandle::gather, nb::arg("pids"), nb::arg("timeout_s"))
      .def("turn_away", &FounderHandle::turn_away, nb::arg("why"), nb::arg("ranks"),
           nb::arg("lost"))
      .def("found", &FounderHandle::found, nb::arg("timeout_s"), nb::arg("world") = nb::none());
  nb::class_<Link>(module, "Link")
      .def(nb::init<const std::string&>(), nb::arg("name"))
      .def("join", &Link::join, nb::arg("secret"), nb::arg("rank"), nb::arg("ranks"),
           nb::arg("timeout_s"), nb::arg("world") = nb::none());
  nb::class_<Session> session(module, "Session");
  session.def_prop_ro("rank", &Session::rank)
      .def_prop_ro("size", &Session::size)
      .def_prop_ro("sequence", &Session::sequence)
      .def_prop_ro("call", &Session::call)
      .def("abort", &Session::abort, nb::arg("reason"))
      .def("leave", &Session::leave, nb::arg("note"))
      .def_prop_rw("name", &Session::name, &Session::set_name)
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
