#include "abi.h"

#include <mutex>
#include <sstream>

#include "check.h"
#include "parallel.h"

#if defined(SPECDEC_BACKEND_CUDA)
// The stable ABI of 2.10 has no way to a native stream handle; this shim of torch's CUDA build is
// the one CUDA symbol used. Weak, so that the library also loads (unused) beside a CPU torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** ret_stream);
#endif

#if defined(SPECDEC_BACKEND_EMU)
extern "C" void emu_register(const void* data, int64_t bytes, const char* name, int read_only);
extern "C" void emu_unregister(const void* data);
#endif

namespace specdec::ops {

std::optional<DType> dtype_of(const Tensor& t) {
    switch (t.scalar_type()) {
        case ScalarType::Float:
            return DType::kF32;
        case ScalarType::Half:
            return DType::kF16;
        case ScalarType::BFloat16:
            return DType::kBF16;
        case ScalarType::Float8_e4m3fn:
            return DType::kF8E4M3;
        case ScalarType::Int:
            return DType::kI32;
        case ScalarType::Long:
            return DType::kI64;
        case ScalarType::Bool:
            return DType::kBool;
        default:
            return std::nullopt;
    }
}

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return "float32";
        case DType::kF16:
            return "float16";
        case DType::kBF16:
            return "bfloat16";
        case DType::kF8E4M3:
            return "float8_e4m3fn";
        case DType::kI32:
            return "int32";
        case DType::kI64:
            return "int64";
        default:
            return "bool";
    }
}

std::string dtype_text(const Tensor& t) {
    if (const std::optional<DType> known = dtype_of(t)) return dtype_name(*known);
    switch (t.scalar_type()) {
        case ScalarType::Double:
            return "float64";
        case ScalarType::Byte:
            return "uint8";
        case ScalarType::Char:
            return "int8";
        case ScalarType::Short:
            return "int16";
        case ScalarType::ComplexFloat:
            return "complex64";
        case ScalarType::ComplexDouble:
            return "complex128";
        default:  // torch's own name: UInt16, Float8_e5m2
            return torch::headeronly::toString(t.scalar_type());
    }
}

namespace {
int32_t code_of(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return aoti_torch_dtype_float32();
        case DType::kF16:
            return aoti_torch_dtype_float16();
        case DType::kBF16:
            return aoti_torch_dtype_bfloat16();
        case DType::kF8E4M3:
            return aoti_torch_dtype_float8_e4m3fn();
        case DType::kI32:
            return aoti_torch_dtype_int32();
        case DType::kI64:
            return aoti_torch_dtype_int64();
        default:
            return aoti_torch_dtype_bool();
    }
}

#if !defined(SPECDEC_BACKEND_CUDA)
void use_torch_threads() {
    static std::once_flag once;
    std::call_once(once, [] {
        set_parallel_for(
            [](int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context) {
                torch::stable::parallel_for(begin, end, grain,
                                            [&](int64_t b, int64_t e) { fn(b, e, context); });
            },
            [] { return static_cast<int>(torch::stable::get_num_threads()); });
    });
}
#endif
}  // namespace

// The C entry and not torch::stable::new_empty: that one looks the operator up by its name at every
// call, which cost more than the rest of a small op.
Tensor empty_on(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype) {
    int32_t device_type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    const int64_t ndim = static_cast<int64_t>(sizes.size());
    std::vector<int64_t> strides(sizes.size(), 1);
    for (int64_t d = ndim - 2; d >= 0; --d) {
        strides[d] = strides[d + 1] * (sizes[d + 1] > 1 ? sizes[d + 1] : 1);
    }
    AtenTensorHandle handle;
    const auto error = aoti_torch_empty_strided(ndim, sizes.data(), strides.data(), code_of(dtype),
                                                device_type, like.get_device_index(), &handle);
    if (error != AOTI_TORCH_SUCCESS) {
        std::ostringstream shape;
        for (int64_t d = 0; d < ndim; ++d) shape << (d ? ", " : "") << sizes[d];
        fail(op_at_work(), "memory", "wanted a tensor [", shape.str(), "] of ", dtype_name(dtype),
             ", got none (out of memory?)");
    }
    return Tensor(handle);
}

Tensor zeros_on(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype) {
    Tensor t = empty_on(like, sizes, dtype);
    return torch::stable::zero_(t);
}

Launch::Launch(const char* op, const Tensor& on) : op_(op) {
#if defined(SPECDEC_BACKEND_CUDA)
    guard_.emplace(on.get_device_index());
    if (aoti_torch_get_current_cuda_stream == nullptr ||
        aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream_) != AOTI_TORCH_SUCCESS) {
        fail(op_, "stream", "wanted a torch built with CUDA, got one without");
    }
#else
    (void)on;
    use_torch_threads();
#endif
}

Launch::~Launch() {
#if defined(SPECDEC_BACKEND_EMU)
    for (void* data : registered_) emu_unregister(data);
#endif
}

void* Launch::note(const char* name, const Tensor& t, bool written) {
    void* data = t.data_ptr();
#if defined(SPECDEC_BACKEND_EMU)
    // The span from the first to the last element the strides reach.
    int64_t last = 0;
    for (int d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    if (t.numel() > 0) {
        emu_register(data, (last + 1) * static_cast<int64_t>(t.element_size()), name, !written);
        registered_.push_back(data);
    }
#else
    (void)name;
    (void)written;
#endif
    return data;
}

IndexView Launch::index(const char* name, const Tensor& t) {
    IndexView v;
    v.data = note(name, t, false);
    v.dtype = *dtype_of(t);
    v.size = t.size(0);
    v.stride = t.stride(0);
    return v;
}

void Launch::finish(const Status& status) const {
    if (!status.ok()) fail(op_, "launch", status.what, " (code ", status.code, ")");
}

}  // namespace specdec::ops
