// SPDX-License-Identifier: Apache-2.0
// The router of a mixture of experts: the experts of each token, and their weights.
//
//   score[e] = softmax(logits)[e], or sigmoid(logits[e]) with SIGMOID
//   ids      the top_k experts with the largest score[e] + bias[e], the largest first; the lowest index among equals
//   weights  score[id], divided by their sum if RENORMALIZE, times `scale`
//
// With GROUPS > 1, the experts stand in GROUPS groups of equal size, and only those in the `kept` groups with the
// largest sums of their two largest score + bias are considered.
//
//   logits   X [m, EXPERTS], row stride ld values
//   bias     float32 [EXPERTS], read if HAS_BIAS
//   ids      int32 [m, top_k]; weights  float32 [m, top_k]
//
// A logit that is NaN counts as -infinity. Architectures: all. A warp computes one token.
#include "experts/expert_choice.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kWarps = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    choose_experts(const X* logits, const float* bias, int32_t* ids, float* weights, int m, int top_k, int kept, int ld,
                   float scale) {
  __shared__ ChoiceStorage storage[kWarps];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  const int warp = threadIdx.x / 32;
  const int64_t token = blockIdx.x * kWarps + warp;
  if (token >= m) return;
  choose_token_experts([&](int e) { return to_float(logits[token * ld + e]); }, bias, ids + token * top_k,
                       weights + token * top_k, top_k, kept, scale, storage[warp]);
}
