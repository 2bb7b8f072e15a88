// How a group comes to be, for Python: a founder to meet at, and a link to reach one.
#include "session/founding.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/session.h"
#include "session/reception.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

Secret secret_of(const nb::bytes& bytes) {
  Secret secret{};
  if (bytes.size() != secret.size()) {
    raise_if_failed(Status::error(
        Code::invalid, "a lobby's secret has 16 bytes, not " + std::to_string(bytes.size())));
  }
  std::memcpy(secret.data(), bytes.c_str(), secret.size());
  return secret;
}

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

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
    run_released([&] { return founder_.found(world, "", Deadline::after(timeout_s), session); });
    return session;
  }

 private:
  Founder founder_;
};

class Link {
 public:
  // `moment_s`: how long to try before there is taken to be none.
  Link(const std::string& name, double moment_s) {
    const auto moment = std::chrono::microseconds(static_cast<std::int64_t>(moment_s * 1e6));
    run_released([&] { return reach_lobby(name, socket_, moment); });
  }

  std::unique_ptr<Session> join(const nb::bytes& secret, int rank, int ranks, double timeout_s,
                                const Session* world, const nb::bytes& words) {
    const Secret key = secret_of(secret);
    words_ = text_of(words);
    std::unique_ptr<Session> session;
    run_released([&] {
      return join_founder(std::move(socket_), key, rank, ranks, world, Deadline::after(timeout_s),
                          words_, session);
    });
    return session;
  }

  nb::bytes words() const { return nb::bytes(words_.data(), words_.size()); }

 private:
  Fd socket_;
  std::string words_;
};

// Everybody's words and the session; no session when the ranks are to meet at the store.
nb::tuple receive_all(store::Server& server, const std::string& door, const nb::bytes& secret,
                      std::size_t staging_bytes, const nb::bytes& words, std::size_t ranks,
                      const std::string& slots, double patience_s, double timeout_s) {
  const Reception reception{door, secret_of(secret), staging_bytes, text_of(words), ranks, slots};
  std::vector<std::string> all;
  std::unique_ptr<Session> session;
  run_released([&] {
    return receive(reception, server, Deadline::after(patience_s), Deadline::after(timeout_s), all,
                   session);
  });
  nb::list said;
  for (const std::string& each : all) said.append(nb::bytes(each.data(), each.size()));
  return nb::make_tuple(said, std::move(session));
}

}  // namespace

void bind_founding(nb::module_& module) {
  const nb::bytes nothing("", 0);
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
      .def(nb::init<const std::string&, double>(), nb::arg("name"), nb::arg("moment_s") = 0)
      .def("join", &Link::join, nb::arg("secret"), nb::arg("rank"), nb::arg("ranks"),
           nb::arg("timeout_s"), nb::arg("world") = nb::none(), nb::arg("words") = nothing)
      .def_prop_ro("words", &Link::words);
  module.def("receive", &receive_all, nb::arg("server"), nb::arg("door"), nb::arg("secret"),
             nb::arg("staging_bytes"), nb::arg("words"), nb::arg("ranks"), nb::arg("slots"),
             nb::arg("patience_s"), nb::arg("timeout_s"));
}

}  // namespace gradsync
