// Tensors whose memory was adopted, for Python: who frees such a tensor frees this with it.
#include <nanobind/ndarray.h>

#include "bindings/session.h"

namespace nb = nanobind;

namespace gradsync {
namespace {

class Adoption {
 public:
  Adoption(std::unique_ptr<Adopted> adopted, std::byte* memory, std::size_t bytes)
      : adopted_(std::move(adopted)), memory_(memory), bytes_(bytes) {}
  Adoption(Adoption&&) = default;
  ~Adoption() {
    if (adopted_ == nullptr || adopted_->release()) return;
    // It must not be freed as it is.
    (void)adopted_.release();
    (void)owner_.release();
  }

  // In one go: between swapping and noting whose it was, an interrupt would free it.
  void move_into(nb::handle storage, nb::object before) {
    storage.attr("_swap_data_ptr_")(before);
    owner_ = std::move(before);
    adopted_->dies_with_memory();
  }
  nb::ndarray<std::uint8_t, nb::ndim<1>> memory(nb::handle self) const {
    return {memory_, {bytes_}, self};
  }

 private:
  nb::object owner_;  // of the memory, before; goes after the adoption
  std::unique_ptr<Adopted> adopted_;
  std::byte* memory_;
  std::size_t bytes_;
};

}  // namespace

void bind_adoption(nb::module_& module, nb::class_<Session>& session) {
  nb::class_<Adoption>(module, "Adoption")
      .def_prop_ro(
          "memory",
          [](nb::handle_t<Adoption> self) { return nb::cast<const Adoption&>(self).memory(self); })
      .def("move_into", &Adoption::move_into, nb::arg("storage"), nb::arg("before"));
  session.def(
      "adopt",
      [](Session& self, std::uintptr_t address, std::size_t nbytes, std::uintptr_t memory,
         std::size_t memory_bytes, bool copied_at_fork) {
        std::unique_ptr<Adopted> adopted;
        const auto in_child = copied_at_fork ? Adopted::InChild::copy : Adopted::InChild::view;
        run_released([&] {
          return Adopted::adopt(self.arena(), self.arena_rank(), at(address), nbytes, in_child,
                                adopted);
        });
        return Adoption(std::move(adopted), at(memory), memory_bytes);
      },
      nb::arg("address"), nb::arg("nbytes"), nb::arg("memory"), nb::arg("memory_bytes"),
      nb::arg("copied_at_fork"));
}

}  // namespace gradsync
