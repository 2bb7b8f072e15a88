// The thread of a world that answers peers who wait for this rank in vain. It sleeps in the core
// and takes Python's lock only when one asks. Where the rank serves the store, it gets that going
// first: to start a second thread is nothing that a new world should wait for.
#include <nanobind/stl/string.h>

#include <memory>

#include "bindings/callback.h"
#include "bindings/session.h"
#include "common/fork.h"
#include "common/lent_thread.h"
#include "store/server.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

class Answering {
 public:
  // `standing` returns where this process stands. `server`, a store's, may be None.
  Answering(nb::object session, nb::object standing, nb::object server)
      : work_(std::make_shared<Work>(Work{
            nb::cast<Session*>(session), server.is_none() ? nullptr : nb::cast<Server*>(server),
            keep_alive(session), keep_alive(standing), keep_alive(server)})),
        thread_(std::make_unique<LentThread>([work = work_] { work->run(); })) {}
  ~Answering() { stop(); }
  Answering(const Answering&) = delete;
  Answering& operator=(const Answering&) = delete;

  void stop() {
    // Ours alone from here on: another thread may call this when Python's lock is given back.
    auto thread = std::move(thread_);
    if (thread == nullptr) return;
    work_->session->stop_answering();
    if (started_in_ != fork_generation()) {
      static_cast<void>(thread.release());  // a forked child does not have it
      return;
    }
    if (thread->is_current()) return;  // the last reference was dropped while it answered
    const Unlocked unlocked;           // it may be in Python
    thread->wait();
  }

 private:
  using Server = store::Server;

  struct Work {
    Session* session;
    Server* server;
    std::shared_ptr<void> kept_session;
    std::shared_ptr<void> standing;
    std::shared_ptr<void> kept_server;

    void run() const {
      // Should that fail, it is tried again by whoever uses the store, and told to them.
      if (server != nullptr) static_cast<void>(server->run());
      while (const std::uint32_t question = session->next_question()) {
        session->answer(question, ask_python());
      }
    }

    std::string ask_python() const {
      const Visit python;
      if (!python) return "";
      try {
        return nb::cast<std::string>(nb::handle(static_cast<PyObject*>(standing.get()))());
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("telling where this rank stands");
      } catch (const std::exception&) {  // what it returned is no text
      }
      return "";
    }
  };

  std::shared_ptr<const Work> work_;
  std::unique_ptr<LentThread> thread_;
  std::uint64_t started_in_ = fork_generation();
};

}  // namespace

void bind_answering(nb::module_& module) {
  nb::class_<Answering>(module, "Answering")
      .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("session"), nb::arg("standing"),
           nb::arg("server").none())
      .def("stop", &Answering::stop);
}

}  // namespace gradsync
