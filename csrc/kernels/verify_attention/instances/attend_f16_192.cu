#include "verify_attention/attend.cuh"

namespace specdec::cuda {
template Status attend<f16, f16, 192, 128>(const VerifyAttentionParams&, const AttendPlan&, Stream);
template Status attend<f16, f16, 192, 192>(const VerifyAttentionParams&, const AttendPlan&, Stream);
}  // namespace specdec::cuda
