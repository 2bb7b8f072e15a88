// Tensors whose memory was adopted, for Python: who frees such a tensor frees this with it.
#include <nanobind/ndarray.h>

#include "bindings/session.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

struct Adoption {
  // What owned the memory before; its end must come after that of the adoption.
  nb::object owner;
  std::unique_ptr<Adopted> adopted;
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};

}  // namespace

void bind_adoption(nb::module_& module, nb::class_<Session>& session) {
  nb::class_<Adoption>(module, "Adoption")
      .def(
          "hand_over",
          [](Adoption& self, nb::object owner, bool lives_on) {
            self.owner = std::move(owner);
            if (!lives_on) self.adopted->dies_with_memory();
          },
          nb::arg("owner"), nb::arg("lives_on"))
      .def_prop_ro("memory", [](nb::handle_t<Adoption> self) {
        const auto& adoption = nb::cast<const Adoption&>(self);
        return nb::ndarray<std::uint8_t, nb::ndim<1>>(adoption.memory, {adoption.bytes}, self);
      });
  session.def(
      "adopt",
      [](Session& self, std::uintptr_t address, std::size_t nbytes, std::uintptr_t memory,
         std::size_t memory_bytes) {
        Adoption made{nb::none(), nullptr, at(memory), memory_bytes};
        run_released([&] {
          return Adopted::adopt(self.arena(), self.arena_rank(), at(address), nbytes, made.adopted);
        });
        return made;
      },
      nb::arg("address"), nb::arg("nbytes"), nb::arg("memory"), nb::arg("memory_bytes"));
}

}  // namespace gradsync
