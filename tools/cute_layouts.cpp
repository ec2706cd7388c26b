// Prints, as JSON, which matrix element each lane holds, according to CuTe's traits of the tensor core
// instructions. tools/cute_layouts.py compiles and runs it; only host code, no CUDA toolkit.
#include <cstdio>

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>

namespace {

using namespace cute;

constexpr int kLanes = 32;
bool first = true;

template <class Element>
void print(const char* name, int values, Element element) {
    std::printf("%s\n  \"%s\": [", first ? "" : ",", name);
    first = false;
    for (int lane = 0; lane < kLanes; ++lane) {
        std::printf("%s[", lane == 0 ? "" : ", ");
        for (int v = 0; v < values; ++v) std::printf("%s%d", v == 0 ? "" : ", ", element(lane, v));
        std::printf("]");
    }
    std::printf("]");
}

// Element v of a lane's registers, as an index into the column-major matrix.
template <class Layout>
void print_fragment(const char* name, const Layout& layout) {
    print(name, int(size<1>(layout)), [&](int lane, int v) { return int(layout(lane, v)); });
}

// 16-bit element v of a lane's result, as 8 * (lane that gave the row's address) + (column).
template <class Operation>
void print_copy(const char* name) {
    using Traits = Copy_Traits<Operation>;
    const typename Traits::SrcLayout source{};
    const typename Traits::DstLayout target{};
    constexpr int kBits = 16;
    const int values = int(size<1>(target)) / kBits;
    print(name, values, [&](int lane, int v) {
        const int bit = int(target(lane, v * kBits));
        for (int from = 0; from < kLanes; ++from) {
            for (int column = 0; column < 8; ++column) {
                if (int(source(from, column * kBits)) == bit) return 8 * from + column;
            }
        }
        return -1;
    });
}

template <class Operation>
void print_mma(const char* a, const char* b, const char* c) {
    using Traits = MMA_Traits<Operation>;
    print_fragment(a, typename Traits::ALayout{});
    print_fragment(b, typename Traits::BLayout{});
    print_fragment(c, typename Traits::CLayout{});
}

}  // namespace

int main() {
    std::printf("{");
    print_mma<SM80_16x8x16_F32BF16BF16F32_TN>("mma_bf16_a", "mma_bf16_b", "mma_bf16_c");
    print_mma<SM80_16x8x16_F32F16F16F32_TN>("mma_f16_a", "mma_f16_b", "mma_f16_c");
    print_copy<SM75_U32x2_LDSM_N>("ldmatrix_x2");
    print_copy<SM75_U32x4_LDSM_N>("ldmatrix_x4");
    print_copy<SM75_U16x4_LDSM_T>("ldmatrix_x2_trans");
    print_copy<SM75_U16x8_LDSM_T>("ldmatrix_x4_trans");
    std::printf("\n}\n");
}
