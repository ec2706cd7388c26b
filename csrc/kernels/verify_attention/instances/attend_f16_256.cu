#include "verify_attention/attend.cuh"

namespace specdec::cuda {
template Status attend<f16, f16, 256, 256>(const VerifyAttentionParams&, const AttendPlan&, Stream);
}  // namespace specdec::cuda
