#include "verify_attention/attend.cuh"

namespace specdec::cuda {
template Status attend<bf16, bf16, 256, 256>(const VerifyAttentionParams&, const AttendPlan&,
                                             Stream);
}  // namespace specdec::cuda
