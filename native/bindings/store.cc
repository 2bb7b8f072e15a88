// The networked store for Python: str or bytes in, bytes out, no GIL while anything is under way.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "common/interrupt.h"
#include "store/client.h"
#include "store/server.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

using store::Address;
using store::Client;
using store::Server;
using store::ServerOptions;

// What a signal handler has raised comes first, even when the answer came in the same moment.
void raise_if_stopped(const Status& status) {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  raise_if_failed(status);
}

// The bytes of a key or value, and the object that keeps them alive.
struct Text {
  Text(nb::handle object, const char* what) : owner(nb::borrow(object)) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyUnicode_Check(object.ptr())) {
      const char* utf8 = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
      if (utf8 != nullptr) {
        view = {utf8, static_cast<std::size_t>(size)};
        return;
      }
      PyErr_Clear();  // bytes that were no text, as `surrogateescape` carries them
      owner = nb::steal(PyUnicode_AsEncodedString(object.ptr(), "utf-8", "surrogateescape"));
      if (!owner.is_valid()) throw nb::python_error();
    } else if (!PyBytes_Check(object.ptr())) {
      PyErr_Format(PyExc_TypeError, "a %s must be str or bytes, got %s: %R", what,
                   Py_TYPE(object.ptr())->tp_name, object.ptr());
      throw nb::python_error();
    }
    if (PyBytes_AsStringAndSize(owner.ptr(), &data, &size) != 0) throw nb::python_error();
    view = {data, static_cast<std::size_t>(size)};
  }

  nb::object owner;
  std::string_view view;
};

struct Texts {
  Texts(nb::handle sequence, const char* what) {
    // One text is a sequence too, of letters; whoever passes one has forgotten the brackets.
    if (PyUnicode_Check(sequence.ptr()) || PyBytes_Check(sequence.ptr())) {
      PyErr_Format(PyExc_TypeError, "expected a list of %ss, got one: %R", what, sequence.ptr());
      throw nb::python_error();
    }
    for (const nb::handle item : nb::iter(sequence)) {
      Text text(item, what);
      owners.push_back(std::move(text.owner));
      views.push_back(text.view);
    }
  }

  std::vector<nb::object> owners;
  store::Strings views;
};

std::int64_t int64_of(nb::handle number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) {
    raise_if_failed(Status::error(Code::invalid, "add takes integers of 64 bits"));
  }
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

nb::bytes to_bytes(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

nb::list to_list(const std::vector<std::string>& strings) {
  nb::list list;
  for (const std::string& string : strings) list.append(to_bytes(string));
  return list;
}

// Runs `work` without the GIL and raises what it returns.
template <typename Work>
void run(Work work) {
  raise_if_stopped(released(work));
}

Address tcp(std::string host, std::uint16_t port) { return {false, std::move(host), port}; }
Address unix_name(std::string name) { return {true, std::move(name), 0}; }

std::unique_ptr<Server> serve(Status (*how)(const ServerOptions&, std::unique_ptr<Server>&),
                              const Address& address, const std::string& token,
                              int listen_fd = -1) {
  ServerOptions options;
  options.address = address;
  options.token = token;
  options.listen_fd = listen_fd;
  std::unique_ptr<Server> server;
  run([&] { return how(options, server); });
  return server;
}

std::unique_ptr<Client> connect(const Address& address, const std::string& token,
                                double timeout_s) {
  std::unique_ptr<Client> client;
  run([&] { return Client::connect(address, token, timeout_s, client); });
  return client;
}

void bind_server(nb::module_& module) {
  nb::class_<Server>(module, "StoreServer", nb::is_weak_referenceable(),
                     "A store's server on a thread of its own; it stops when it is released.")
      .def_static(
          "tcp",
          [](std::string host, std::uint16_t port, const std::string& token, int listen_fd) {
            return serve(Server::start, tcp(std::move(host), port), token, listen_fd);
          },
          nb::arg("host"), nb::arg("port"), nb::arg("token"), nb::arg("listen_fd") = -1)
      .def_static(
          "unix",
          [](std::string name, const std::string& token) {
            return serve(Server::start, unix_name(std::move(name)), token);
          },
          nb::arg("name"), nb::arg("token"))
      .def_static(
          "reserve_unix",
          [](std::string name, const std::string& token) {
            return serve(Server::reserve, unix_name(std::move(name)), token);
          },
          nb::arg("name"), nb::arg("token"))
      .def("run", [](Server& self) { run([&] { return self.run(); }); })
      .def_prop_ro("instance",
                   [](const Server& self) {
                     return nb::bytes(self.instance().data(), self.instance().size());
                   })
      .def_prop_ro("port", &Server::port);
}

void bind_single_keys(nb::class_<Client>& type) {
  type.def("set", [](Client& self, nb::handle key, nb::handle value, double timeout_s) {
    const Text name(key, "key");
    const Text bytes(value, "value");
    run([&] { return self.set(name.view, bytes.view, timeout_s); });
  });
  type.def("get", [](Client& self, nb::handle key, double timeout_s) {
    const Text name(key, "key");
    std::string value;
    run([&] { return self.get(name.view, timeout_s, value); });
    return to_bytes(value);
  });
  type.def("add", [](Client& self, nb::handle key, nb::handle amount, double timeout_s) {
    const Text name(key, "key");
    const std::int64_t number = int64_of(amount);
    std::int64_t sum = 0;
    run([&] { return self.add(name.view, number, timeout_s, sum); });
    return sum;
  });
  type.def("compare_set", [](Client& self, nb::handle key, nb::handle expected, nb::handle desired,
                             double timeout_s) {
    const Text name(key, "key");
    const Text before(expected, "value");
    const Text after(desired, "value");
    std::string value;
    run([&] { return self.compare_set(name.view, before.view, after.view, timeout_s, value); });
    return to_bytes(value);
  });
  type.def("append", [](Client& self, nb::handle key, nb::handle value, double timeout_s) {
    const Text name(key, "key");
    const Text bytes(value, "value");
    run([&] { return self.append(name.view, bytes.view, timeout_s); });
  });
  type.def("delete_key", [](Client& self, nb::handle key, double timeout_s) {
    const Text name(key, "key");
    bool existed = false;
    run([&] { return self.remove(name.view, timeout_s, existed); });
    return existed;
  });
}

void bind_many_keys(nb::class_<Client>& type) {
  type.def("check", [](Client& self, nb::handle keys, double timeout_s) {
    const Texts names(keys, "key");
    bool all_there = false;
    run([&] { return self.check(names.views, timeout_s, all_there); });
    return all_there;
  });
  type.def("wait", [](Client& self, nb::handle keys, double timeout_s) {
    const Texts names(keys, "key");
    run([&] { return self.wait(names.views, timeout_s); });
  });
  type.def("multi_get", [](Client& self, nb::handle keys, double timeout_s) {
    const Texts names(keys, "key");
    std::vector<std::string> values;
    run([&] { return self.multi_get(names.views, timeout_s, values); });
    return to_list(values);
  });
  type.def("multi_set", [](Client& self, nb::handle keys, nb::handle values, double timeout_s) {
    const Texts names(keys, "key");
    const Texts bytes(values, "value");
    run([&] { return self.multi_set(names.views, bytes.views, timeout_s); });
  });
  type.def("num_keys", [](Client& self, double timeout_s) {
    std::int64_t count = 0;
    run([&] { return self.num_keys(timeout_s, count); });
    return count;
  });
  type.def("list_keys", [](Client& self, double timeout_s) {
    std::vector<std::string> keys;
    run([&] { return self.list_keys(timeout_s, keys); });
    return to_list(keys);
  });
}

void bind_queues(nb::class_<Client>& type) {
  type.def("queue_push", [](Client& self, nb::handle key, nb::handle value, double timeout_s) {
    const Text name(key, "key");
    const Text bytes(value, "value");
    run([&] { return self.queue_push(name.view, bytes.view, timeout_s); });
  });
  type.def("queue_pop", [](Client& self, nb::handle key, bool block, double timeout_s) {
    const Text name(key, "key");
    std::string value;
    run([&] { return self.queue_pop(name.view, block, timeout_s, value); });
    return to_bytes(value);
  });
  type.def("queue_len", [](Client& self, nb::handle key, double timeout_s) {
    const Text name(key, "key");
    std::int64_t length = 0;
    run([&] { return self.queue_len(name.view, timeout_s, length); });
    return length;
  });
  type.def("barrier",
           [](Client& self, nb::handle key, std::int64_t participants, double timeout_s) {
             const Text name(key, "key");
             run([&] { return self.barrier(name.view, participants, timeout_s); });
           });
}

}  // namespace

void bind_store(nb::module_& module) {
  bind_server(module);
  nb::class_<Client> type(module, "StoreClient",
                          "A connection to a store's server. Every last argument is the longest "
                          "wait in seconds, 0 for ever.");
  type.def_static(
      "tcp",
      [](std::string host, std::uint16_t port, const std::string& token, double timeout_s) {
        return connect(tcp(std::move(host), port), token, timeout_s);
      },
      nb::arg("host"), nb::arg("port"), nb::arg("token"), nb::arg("timeout_s"));
  type.def_static(
      "unix",
      [](std::string name, const std::string& token, double timeout_s) {
        return connect(unix_name(std::move(name)), token, timeout_s);
      },
      nb::arg("name"), nb::arg("token"), nb::arg("timeout_s"));
  type.def_static(
      "unix_at_once",
      [](std::string name, const std::string& token, double timeout_s, const nb::bytes& instance) {
        store::Id id{};
        std::memcpy(id.data(), instance.c_str(), std::min(id.size(), instance.size()));
        const Address address = unix_name(std::move(name));
        std::unique_ptr<Client> client;
        run([&] { return Client::connect_at_once(address, token, id, timeout_s, client); });
        return client;
      },
      nb::arg("name"), nb::arg("token"), nb::arg("timeout_s"), nb::arg("instance"));
  bind_single_keys(type);
  bind_many_keys(type);
  bind_queues(type);
  type.def("cut", [](Client& self) { run([&] { return self.cut(), Status::success(); }); });
}

}  // namespace gradsync
