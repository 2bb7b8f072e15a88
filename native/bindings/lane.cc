// The short way for synchronous calls on plain tensors: from the Python objects to the session
// without anything being built in between.
//
// Every method returns whether the call was carried out. If not, be it because a tensor needs
// preparation, because somebody observes the group's calls or because the call failed, the caller
// takes the ordinary way, which carries it out or says what is wrong. (A call that failed has
// broken the group, so it is not tried again: the session gives the same answer.)
#include <algorithm>
#include <climits>

#include "bindings/row.h"
#include "bindings/session.h"
#include "p2p/mailbox.h"
#include "session/familiar.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

class Lane {
 public:
  // A lane that is closed.
  Lane() = default;
  // `adopt` is called with tensors that are reduced again and again, and whether they have to fill
  // their storage; it returns whether that was the moment for it.
  Lane(nb::object session, double timeout_s, nb::list before, nb::list after, nb::object adopt,
       TensorReader reader)
      : kept_(std::move(session)),
        session_(nb::cast<Session*>(kept_)),
        timeout_s_(timeout_s),
        before_(std::move(before)),
        after_(std::move(after)),
        adopt_(std::move(adopt)),
        reader_(std::move(reader)) {}

  bool barrier() {
    if (!open()) return false;
    return carry_out(0, [&](Deadline deadline) { return session_->barrier(deadline); });
  }

  bool all_reduce(nb::handle tensor, nb::handle op) {
    PlainTensor plain;
    Reduce reduce{};
    if (!open() || !reader_.read(tensor, plain) || !read_reduce(op, reduce)) return false;
    const Familiar::Due due = familiar_.is_due(plain.data, plain.bytes());
    if (due != Familiar::Due::no) {
      const bool only_whole = due == Familiar::Due::if_it_fills_its_memory;
      if (!nb::cast<bool>(adopt_(tensor, only_whole))) familiar_.put_off(plain.data);
    }
    return carry_out(plain.bytes(), [&](Deadline deadline) {
      return session_->all_reduce(plain.data, plain.count, plain.dtype, reduce, deadline);
    });
  }

  bool broadcast(nb::handle tensor, nb::handle source) {
    PlainTensor plain;
    int root = 0;
    if (!open() || !reader_.read(tensor, plain) || !read_root(source, root)) return false;
    return carry_out(plain.bytes(), [&](Deadline deadline) {
      return session_->broadcast(plain.data, plain.count, plain.dtype, root, deadline);
    });
  }

  bool reduce(nb::handle tensor, nb::handle target, nb::handle op) {
    PlainTensor plain;
    int root = 0;
    Reduce operation{};
    if (!open() || !reader_.read(tensor, plain) || !read_root(target, root)) return false;
    if (!read_reduce(op, operation)) return false;
    return carry_out(plain.bytes(), [&](Deadline deadline) {
      return session_->reduce(plain.data, plain.count, plain.dtype, operation, root, deadline);
    });
  }

  bool all_gather(nb::handle outputs, nb::handle tensor) {
    PlainTensor plain;
    if (!open() || !reader_.read(tensor, plain)) return false;
    Row<std::byte> row(session_->size());
    if (!row.read(reader_, outputs, plain.dtype, &plain) || meets(row, plain)) return false;
    return carry_out(row.bytes(), [&](Deadline deadline) {
      return session_->all_gather(plain.data, plain.count, plain.dtype, row.addresses(), deadline);
    });
  }

  bool all_gather_single(nb::handle output, nb::handle tensor) {
    PlainTensor whole, part;
    if (!open() || !read_stacked(output, tensor, whole, part)) return false;
    const auto addresses = parts<std::byte>(whole, part.count);
    return carry_out(whole.bytes(), [&](Deadline deadline) {
      return session_->all_gather(part.data, part.count, part.dtype, addresses.all(), deadline);
    });
  }

  bool gather(nb::handle tensor, nb::handle outputs, nb::handle target) {
    PlainTensor plain;
    int root = 0;
    if (!open() || !reader_.read(tensor, plain) || !read_root(target, root)) return false;
    Row<std::byte> row(session_->rank() == root ? session_->size() : 0);
    if (!read_at_root(outputs, root, plain, row) || meets(row, plain)) return false;
    return carry_out(plain.bytes() + row.bytes(), [&](Deadline deadline) {
      return session_->gather(plain.data, plain.count, plain.dtype, row.addresses(), root,
                              deadline);
    });
  }

  bool scatter(nb::handle tensor, nb::handle inputs, nb::handle source) {
    PlainTensor plain;
    int root = 0;
    if (!open() || !reader_.read(tensor, plain) || !read_root(source, root)) return false;
    Row<const std::byte> row(session_->rank() == root ? session_->size() : 0);
    if (!read_at_root(inputs, root, plain, row) || meets(row, plain)) return false;
    return carry_out(plain.bytes() + row.bytes(), [&](Deadline deadline) {
      return session_->scatter(row.addresses(), plain.data, plain.count, plain.dtype, root,
                               deadline);
    });
  }

  bool reduce_scatter(nb::handle output, nb::handle inputs, nb::handle op) {
    PlainTensor part, own;
    Reduce reduce{};
    if (!open() || !reader_.read(output, part) || !read_reduce(op, reduce)) return false;
    Row<const std::byte> row(session_->size());
    if (!row.read(reader_, inputs, part.dtype, nullptr)) return false;
    if (!reader_.read(row.tensor(session_->rank()), own) || !own.is_like(part)) return false;
    if (meets(row, part)) return false;
    return carry_out(row.bytes(), [&](Deadline deadline) {
      return session_->reduce_scatter(row.addresses(), row.counts(), part.data, part.dtype, reduce,
                                      deadline);
    });
  }

  bool reduce_scatter_single(nb::handle output, nb::handle tensor, nb::handle op) {
    PlainTensor whole, part;
    Reduce reduce{};
    if (!open() || !read_stacked(tensor, output, whole, part) || !read_reduce(op, reduce)) {
      return false;
    }
    const auto from = parts<const std::byte>(whole, part.count);
    const Few<std::size_t> counts(from.size(), part.count);
    return carry_out(whole.bytes(), [&](Deadline deadline) {
      return session_->reduce_scatter(from.all(), counts.all(), part.data, part.dtype, reduce,
                                      deadline);
    });
  }

  bool all_to_all(nb::handle outputs, nb::handle inputs) {
    PlainTensor first;
    if (!open() || !PyList_CheckExact(inputs.ptr()) || PyList_GET_SIZE(inputs.ptr()) == 0) {
      return false;
    }
    if (!reader_.read(PyList_GET_ITEM(inputs.ptr(), 0), first)) return false;
    Row<const std::byte> from(session_->size());
    Row<std::byte> to(session_->size());
    if (!from.read(reader_, inputs, first.dtype, nullptr)) return false;
    if (!to.read(reader_, outputs, first.dtype, nullptr)) return false;
    const auto mine = static_cast<std::size_t>(session_->rank());
    if (from.counts()[mine] != to.counts()[mine]) return false;
    for (std::size_t i = 0; i < from.counts().size(); ++i) {
      const int own = static_cast<int>(i) == session_->rank() ? session_->rank() : -1;
      if (to.meets(from.addresses()[i], from.counts()[i], first.dtype, own)) return false;
    }
    return carry_out(from.bytes() + to.bytes(), [&](Deadline deadline) {
      return session_->all_to_all(from.pieces(), to.pieces(), first.dtype, deadline);
    });
  }

  // Pieces of one size.
  bool all_to_all_single(nb::handle output, nb::handle tensor) {
    PlainTensor to, from;
    if (!open() || !reader_.read(output, to) || !reader_.read(tensor, from)) return false;
    const auto ranks = static_cast<std::int64_t>(session_->size());
    if (!to.is_like(from) || from.shape.empty() || from.shape[0] % ranks != 0) return false;
    if (overlap(to.data, to.count, from.data, from.count, to.dtype)) return false;
    const std::size_t count = from.count / static_cast<std::size_t>(ranks);
    const auto given = parts<const std::byte>(from, count);
    const auto wanted = parts<std::byte>(to, count);
    const Few<std::size_t> counts(given.size(), count);
    return carry_out(2 * from.bytes(), [&](Deadline deadline) {
      return session_->all_to_all({given.all(), counts.all()}, {wanted.all(), counts.all()},
                                  from.dtype, deadline);
    });
  }

  // Messages. What went wrong with one is raised: the ordinary way would send it once more.
  bool send(nb::handle tensor, nb::handle target, nb::handle tag) {
    return transfer(true, tensor, target, tag) != not_carried_out;
  }
  // Returns who sent it.
  int recv(nb::handle tensor, nb::handle source, nb::handle tag) {
    return transfer(false, tensor, source, tag);
  }
  static constexpr int not_carried_out = -2;

  // For Python's garbage collector: a hook may know the group that we belong to.
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const Lane& lane = *nb::inst_ptr<Lane>(self);
    Py_VISIT(lane.before_.ptr());
    Py_VISIT(lane.after_.ptr());
    Py_VISIT(lane.adopt_.ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    Lane& lane = *nb::inst_ptr<Lane>(self);
    lane.session_ = nullptr;
    lane.before_.reset();
    lane.after_.reset();
    lane.adopt_.reset();
    return 0;
  }

 private:
  // Hooks see every call, and they come and go.
  bool open() const {
    return session_ != nullptr && PyList_GET_SIZE(before_.ptr()) == 0 &&
           PyList_GET_SIZE(after_.ptr()) == 0;
  }

  static bool read_number(nb::handle object, int end, int& out) {
    if (!PyLong_Check(object.ptr())) return false;
    const long number = PyLong_AsLong(object.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) PyErr_Clear();
    out = static_cast<int>(number);
    return number >= 0 && number < end;
  }
  bool read_root(nb::handle object, int& out) const {
    return read_number(object, session_->size(), out);
  }
  static bool read_reduce(nb::handle op, Reduce& out) {
    // A boolean is no reduction, and the last one needs a factor: the ordinary way says so.
    constexpr int end = static_cast<int>(Reduce::premul_sum);
    int number = 0;
    if (PyBool_Check(op.ptr()) || !read_number(op, end, number)) return false;
    out = static_cast<Reduce>(number);
    return true;
  }

  // Whether `whole` is one `part` for each rank, one after the other along dimension 0.
  bool read_stacked(nb::handle stacked, nb::handle single, PlainTensor& whole,
                    PlainTensor& part) const {
    if (!reader_.read(stacked, whole) || !reader_.read(single, part)) return false;
    const auto own = whole.data + static_cast<std::size_t>(session_->rank()) * part.bytes();
    return whole.dtype == part.dtype && !part.shape.empty() &&
           whole.shape.size() == part.shape.size() &&
           whole.shape[0] == part.shape[0] * session_->size() &&
           std::equal(whole.shape.begin() + 1, whole.shape.end(), part.shape.begin() + 1) &&
           (part.data == own ||
            !overlap(part.data, part.count, whole.data, whole.count, part.dtype));
  }

  template <typename Byte>
  bool meets(const Row<Byte>& row, const PlainTensor& tensor) const {
    return row.meets(tensor.data, tensor.count, tensor.dtype, session_->rank());
  }

  // The root gives a list, the others none.
  template <typename Byte>
  bool read_at_root(nb::handle list, int root, const PlainTensor& like, Row<Byte>& out) const {
    if (session_->rank() != root) return list.is_none();
    return out.read(reader_, list, like.dtype, &like);
  }

  template <typename Byte>
  Few<Byte*> parts(const PlainTensor& whole, std::size_t count) const {
    Few<Byte*> all(static_cast<std::size_t>(session_->size()));
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = whole.data + i * count * size_of(whole.dtype);
    }
    return all;
  }

  // `bytes`: how many are moved, more or less.
  template <typename Call>
  bool carry_out(std::size_t bytes, Call call) {
    // About a microsecond of copying.
    constexpr std::size_t few_bytes = 4096;
    Status status;
    if (bytes <= few_bytes) {
      const UnlockedToWait unlocked;
      status = call(Deadline::after(timeout_s_));
    } else {
      const Unlocked unlocked;
      status = call(Deadline::after(timeout_s_));
    }
    // A signal handler raised. Without its exception it was an earlier call that was interrupted,
    // and the long way tells of that as of any failure.
    if (status.code == Code::interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
    return status.ok();
  }

  int transfer(bool is_send, nb::handle tensor, nb::handle other, nb::handle tag) {
    PlainTensor plain;
    int peer = any_source, number = 0;
    if (!open() || !reader_.read(tensor, plain)) return not_carried_out;
    if ((is_send || !other.is_none()) && !read_root(other, peer)) return not_carried_out;
    if (peer == session_->rank() || !read_number(tag, INT_MAX, number)) return not_carried_out;
    Transfer what{.is_send = is_send,
                  .peer = peer,
                  .tag = number,
                  .data = plain.data,
                  .extent = {plain.count, plain.dtype},
                  .deadline = {},
                  .owner = nullptr,
                  .site = nullptr};
    int source = any_source;
    // Letting go of the GIL and taking it back would cost more than a small message.
    if (session_->mail().run_now(what, source)) return source;
    run_released([&] {
      what.deadline = Deadline::after(timeout_s_);
      return session_->mail().run(std::move(what), source);
    });
    return source;
  }

  nb::object kept_;
  Session* session_ = nullptr;
  double timeout_s_ = 0;
  nb::object before_, after_, adopt_;
  TensorReader reader_;
  Familiar familiar_;
};

}  // namespace

void bind_lane(nb::module_& module) {
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Lane::traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(Lane::clear)},
                                {0, nullptr}};
  nb::class_<Lane> lane(module, "Lane", nb::type_slots(slots));
  lane.def(nb::init<>())
      .def(
          "__init__",
          [](Lane* self, nb::object session, double timeout_s, nb::list before, nb::list after,
             nb::callable adopt, nb::type_object type, const nb::capsule& table) {
            new (self) Lane(std::move(session), timeout_s, std::move(before), std::move(after),
                            std::move(adopt), TensorReader(std::move(type), table));
          },
          nb::arg("session"), nb::arg("timeout_s"), nb::arg("before"), nb::arg("after"),
          nb::arg("adopt"), nb::arg("tensor_type"), nb::arg("exchange_table"))
      .def("barrier", &Lane::barrier);
  // None is a thing that users pass too.
  const auto first = nb::arg("first").none(), second = nb::arg("second").none(),
             third = nb::arg("third").none();
  lane.def("all_reduce", &Lane::all_reduce, first, second)
      .def("broadcast", &Lane::broadcast, first, second)
      .def("reduce", &Lane::reduce, first, second, third)
      .def("all_gather", &Lane::all_gather, first, second)
      .def("all_gather_single", &Lane::all_gather_single, first, second)
      .def("gather", &Lane::gather, first, second, third)
      .def("scatter", &Lane::scatter, first, second, third)
      .def("reduce_scatter", &Lane::reduce_scatter, first, second, third)
      .def("reduce_scatter_single", &Lane::reduce_scatter_single, first, second, third)
      .def("all_to_all", &Lane::all_to_all, first, second)
      .def("all_to_all_single", &Lane::all_to_all_single, first, second)
      .def("send", &Lane::send, first, second, third)
      .def("recv", &Lane::recv, first, second, third);
}

}  // namespace gradsync
