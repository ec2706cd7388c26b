#include "verify_attention/attend.cuh"

namespace specdec::cuda {
template Status attend<bf16, bf16, 128, 64>(const VerifyAttentionParams&, const AttendPlan&,
                                            Stream);
template Status attend<bf16, bf16, 128, 128>(const VerifyAttentionParams&, const AttendPlan&,
                                             Stream);
}  // namespace specdec::cuda
