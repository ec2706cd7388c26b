// markov_draft on CUDA: placeholder of determinism
#include "kernel.h"

#include "params.h"
namespace specdec::cuda {
int64_t markov_draft_scratch_bytes(const MarkovDraftParams&) {
    return 16;
}
Status markov_draft(const MarkovDraftParams&, Stream) {
    return Status{1, "not written"};
}
}  // namespace specdec::cuda
