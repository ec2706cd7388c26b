// Facts about the running build that only the CPU library knows.
#include "isa.h"
#include "stable/abi.h"

namespace specdec::ops {
namespace {
std::string cpu_isa() {
    return cpu::isa_name(cpu::isa());
}
}  // namespace

// No tensor argument, so no backend key: the composite key answers everywhere.
SPECDEC_LIBRARY_IMPL(SPECDEC_NAMESPACE, CompositeImplicitAutograd, m) {
    m.impl("_cpu_isa", TORCH_BOX(&cpu_isa));
}

}  // namespace specdec::ops
