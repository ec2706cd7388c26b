#include "verify_attention/attend.cuh"

namespace specdec::cuda {
template Status attend<bf16, f8e4m3, 256, 256>(const VerifyAttentionParams&, const AttendPlan&,
                                               Stream);
}  // namespace specdec::cuda
