// The one file that knows torch: it declares every operator of the library and hands raw pointers and sizes to the
// kernels in cpu/. Only the libtorch stable ABI is used here, so one binary serves every torch >= 2.11.
//
// Tensors arrive checked for shape and dtype by eprt/ops/*.py, which words the errors; the checks here guard memory.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "cpu/isa.h"

using torch::stable::Tensor;

namespace {

// ---- instruction set ------------------------------------------------------------------------------------------------

int64_t cpu_isa() { return static_cast<int64_t>(eprt::cpu_isa()); }
int64_t cpu_isa_detected() { return static_cast<int64_t>(eprt::detect_isa()); }
void set_cpu_isa(int64_t isa) { eprt::set_cpu_isa(static_cast<eprt::Isa>(isa)); }

}  // namespace

STABLE_TORCH_LIBRARY(eprt, m) {
  m.def("cpu_isa() -> int");
  m.def("cpu_isa_detected() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_isa_detected", TORCH_BOX(&cpu_isa_detected));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}
