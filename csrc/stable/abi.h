// The seam to torch: this file and check.h are the only ones that include torch headers, and only
// those of the stable ABI (TORCH_TARGET_VERSION 2.10). Everything an op needs from torch is here.
//
// The same ops/<op>.cpp is compiled for three backends, chosen by one macro:
//   SPECDEC_BACKEND_CPU   library _C       namespace specdec       key CPU    kernels specdec::cpu
//   SPECDEC_BACKEND_CUDA  library _C_cuda  namespace specdec       key CUDA   kernels specdec::cuda
//   SPECDEC_BACKEND_EMU   library _C_emu_* namespace specdec_emu*  key CPU    kernels
//   specdec::cuda,
//                         compiled by g++ on the CUDA-on-CPU emulator (tests only)
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "types.h"
#include "view.h"

namespace specdec::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using TensorList = std::vector<Tensor>;

std::optional<DType> dtype_of(const Tensor& t);  // nullopt: a type no op takes
const char* dtype_name(DType dtype);
std::string dtype_text(const Tensor& t);  // of any tensor, as torch spells it: float64
Tensor empty_on(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype);
Tensor zeros_on(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype);

template <class... Outputs, size_t... I>
std::tuple<Outputs...> outputs_of(const StableIValue* stack, std::index_sequence<I...>) {
    return std::tuple<Outputs...>{torch::stable::detail::to<Outputs>(stack[I])...};
}

// Calls another op of this library through the dispatcher; name with its namespace (SPECDEC_OP_NAME). Its
// errors lose their text on the way: check first.
template <class... Outputs, class... Args>
std::tuple<Outputs...> call_op(const char* name, const Args&... args) {
    constexpr size_t kIn = sizeof...(Args), kOut = sizeof...(Outputs);
    std::array<StableIValue, (kIn > kOut ? kIn : kOut)> stack{torch::stable::detail::from(args)...};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
    return outputs_of<Outputs...>(stack.data(), std::index_sequence_for<Outputs...>{});
}

// One op call on one backend: makes the tensors' device current, knows the stream, and in emulated
// builds registers every tensor it hands out, so that an access outside any of them is reported.
class Launch {
  public:
    Launch(const char* op, const Tensor& on);
    ~Launch();
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    Stream stream() const { return stream_; }
    void finish(const Status& status) const;  // throws RuntimeError when a launch failed

    template <int N>
    View<const void, N> in(const char* name, const Tensor& t) {
        return fill<const void, N>(note(name, t, false), t);
    }
    template <int N>
    View<void, N> out(const char* name, const Tensor& t) {
        return fill<void, N>(note(name, t, true), t);
    }
    const void* in_data(const char* name, const Tensor& t) { return note(name, t, false); }
    void* out_data(const char* name, const Tensor& t) { return note(name, t, true); }
    IndexView index(const char* name, const Tensor& t);

  private:
    void* note(const char* name, const Tensor& t, bool written);

    template <class T, int N>
    static View<T, N> fill(T* data, const Tensor& t) {
        View<T, N> v;
        v.data = data;
        for (int d = 0; d < N; ++d) {
            v.size[d] = t.size(d);
            v.stride[d] = t.stride(d);
        }
        return v;
    }

    const char* op_;
    Stream stream_ = nullptr;
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
    std::vector<void*> registered_;
};

}  // namespace specdec::ops

#if defined(SPECDEC_BACKEND_CUDA)
#define SPECDEC_KEY CUDA
#define SPECDEC_BACKEND cuda
#elif defined(SPECDEC_BACKEND_EMU)
#define SPECDEC_KEY CPU
#define SPECDEC_BACKEND cuda
#elif defined(SPECDEC_BACKEND_CPU)
#define SPECDEC_KEY CPU
#define SPECDEC_BACKEND cpu
#else
#error "define SPECDEC_BACKEND_CPU, SPECDEC_BACKEND_CUDA or SPECDEC_BACKEND_EMU"
#endif
#ifndef SPECDEC_NAMESPACE
#define SPECDEC_NAMESPACE specdec
#endif

#define SPECDEC_TEXT_OF(x) #x
#define SPECDEC_TEXT(x) SPECDEC_TEXT_OF(x)
#define SPECDEC_OP_NAME(op) SPECDEC_TEXT(SPECDEC_NAMESPACE) "::" #op

#define SPECDEC_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define SPECDEC_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

// Last line of an ops/<op>.cpp: binds the op's C++ function to the backend being compiled.
#define SPECDEC_REGISTER(op, fn)                              \
    SPECDEC_LIBRARY_IMPL(SPECDEC_NAMESPACE, SPECDEC_KEY, m) { \
        m.impl(#op, TORCH_BOX(&fn));                          \
    }

// Runs the backend's kernel for Params p and turns a failed launch into an error.
#if defined(SPECDEC_BACKEND_CPU)
#define SPECDEC_RUN(op, launch, p) ::specdec::cpu::op(p)
#else
#define SPECDEC_RUN(op, launch, p) (launch).finish(::specdec::cuda::op(p, (launch).stream()))
#endif
