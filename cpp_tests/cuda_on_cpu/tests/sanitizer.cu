// Bugs that only the sanitizer build names: they stay inside a thread's own registers and stack, or
// are undefined in C++ without touching wrong memory. Each has a clean twin, as in detectors.cu.
#include "kernel.h"

using namespace specdec;

namespace {

#define KERNEL(name)     \
    template <bool kBug> \
    __global__ void name(const int* in, int* out)

KERNEL(register_array_index) {
    int r[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; ++i) r[i] += in[i];
    out[threadIdx.x] = r[in[threadIdx.x] + (kBug ? 4 : 3)];  // @register_array_index
}

KERNEL(shift_of_mask) {
    const int bit = in[threadIdx.x] + (kBug ? 40 : 20);
    const unsigned mask = 1u << bit;  // @shift_of_mask
    out[threadIdx.x] = static_cast<int>(mask);
}

KERNEL(float_to_int_overflow) {
    const float x = static_cast<float>(in[threadIdx.x]) + (kBug ? 1e20f : 1e5f);
    out[threadIdx.x] = static_cast<int>(x);  // @float_to_int_overflow
}

KERNEL(signed_overflow) {
    const int x = in[threadIdx.x] + (kBug ? 0x7fffffff : 5);
    out[threadIdx.x] = x + 1;  // @signed_overflow
}

KERNEL(tensor_end) {
    out[threadIdx.x] = in[threadIdx.x + (kBug ? 1 : 0)];  // @tensor_end
}

KERNEL(shared_end) {
    CU_SHARED(a, int[32]);
    int* p = a;
    p[threadIdx.x + (kBug ? 1 : 0)] = in[threadIdx.x];  // @shared_end
    out[threadIdx.x] = p[threadIdx.x + (kBug ? 1 : 0)];
}

KERNEL(misaligned_vector) {
    const int* from = in + (kBug ? 1 : 0);
    const int4 v = *reinterpret_cast<const int4*>(from);  // @misaligned_vector
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}

struct Case {
    const char* name;
    void (*good)(const int*, int*);
    void (*bad)(const int*, int*);
};

#define CASE(name) \
    { #name, name < false>, name < true> }

const Case kCases[] = {
    CASE(register_array_index), CASE(shift_of_mask), CASE(float_to_int_overflow),
    CASE(signed_overflow),      CASE(tensor_end),    CASE(shared_end),
    CASE(misaligned_vector),
};

}  // namespace

// Runs the case on 32 zeros; -1 for an unknown name.
extern "C" __attribute__((visibility("default"))) int sanitizer_run(const char* name, int bug) {
    for (const Case& c : kCases) {
        if (std::strcmp(c.name, name) != 0) continue;
        int* in = new int[32]();
        int* out = new int[32]();
        cu::LaunchCfg cfg;
        cfg.block = dim3(32);
        const int code =
            cu::launch(cfg, bug != 0 ? c.bad : c.good, static_cast<const int*>(in), out).code;
        delete[] in;
        delete[] out;
        return code;
    }
    return -1;
}
