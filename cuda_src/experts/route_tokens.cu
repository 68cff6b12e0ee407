// SPDX-License-Identifier: Apache-2.0
// The residual add, the RMSNorm, the router of a mixture of experts and its choice, for few tokens:
//
//   h[m, i] += delta[m, i]                                    (HAS_DELTA)
//   x[m, i] = h[m, i] / sqrt(mean of h[m, :]^2 + eps) * norm_weight[i]
//   logits[m, e] = sum over i of x[m, i] * router[e, i]
//   ids[m, :], weights[m, :]: the experts of the token, chosen from its logits as in choose_experts.cu
//
//   h            float32 [m, WIDTH], the residual stream
//   delta        X [m, WIDTH], the output of an attention or MLP block, or null
//   norm_weight  float32 [WIDTH]
//   router       X [EXPERTS, WIDTH]
//   bias         float32 [EXPERTS], read if HAS_BIAS
//   x            X [m, WIDTH]
//   logits       float32 [m, EXPERTS], scratch without IS_CLUSTER
//   counters     uint32 [m], zero before and after the launch, without IS_CLUSTER
//   ids          int32 [m, top_k]; weights  float32 [m, top_k]
//
// Grid: (CTAS, m); with IS_CLUSTER, the CTAs of a token are a cluster. Limits: WIDTH is a multiple of 8; arrays are
// aligned to 16 bytes. Architectures: all; with IS_CLUSTER sm_90 and newer.
//
// Each CTA of a token normalizes it, and each warp multiplies it by the router's rows of some experts. One CTA chooses
// the experts: the first one of a cluster, to which the others send logits through DSMEM, or else the last one to
// arrive. h is stored after all CTAs of the token have read it.
// PDL: norm_weight and the first elements of the router's row are loaded before griddepcontrol.wait.
#include "experts/expert_choice.cuh"
#include "hopper/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld.cuh"

constexpr int kWidth = WIDTH;
constexpr int kWarps = THREADS / 32;
constexpr int kCtas = CTAS;  // number of CTAs per token
constexpr int kClusterSize = IS_CLUSTER ? kCtas : 1;
constexpr int kVectors = ceil_div(kWidth, 8 * THREADS);  // number of vectors of eight columns of x per thread
constexpr int kAhead = 8;  // number of loads of the router's row by a lane that are in flight
constexpr bool kHasDelta = HAS_DELTA;

using Chunk = Vector<uint32_t, 4>;  // the 16 bytes of one load

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route_tokens(float* h, const X* delta, const float* norm_weight, const X* router, const float* bias, X* x,
                 float* logits, uint32_t* counters, int32_t* ids, float* weights, int top_k, int kept, float scale,
                 float eps) {
  __shared__ alignas(16) X shared_x[kWidth];
  __shared__ float warp_sums[kWarps];
  __shared__ ChoiceStorage storage;
  __shared__ float sent_logits[kClusterSize > 1 ? kExperts : 1];
  __shared__ bool is_last;
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.y;
  const int first_expert = blockIdx.x * kWarps + warp;
  Chunk ahead[kAhead];
  auto fetch = [&](int expert, int first) {
    const X* const row = router + static_cast<int64_t>(expert) * kWidth;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int column = first + (i * 32 + lane) * 8;
      if (column >= kWidth) continue;
      if constexpr (__CUDA_ARCH__ >= 750) {
        ptx::ld_global_no_allocate(ahead[i].values, row + column);
      } else {
        load<true>(ahead[i], reinterpret_cast<const uint32_t*>(row + column));
      }
    }
  };
  if (first_expert < kExperts) fetch(first_expert, 0);
  Vector<float, 8> values[kVectors] = {}, factors[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = (j * THREADS + threadIdx.x) * 8;
    if (column < kWidth) load<true>(factors[j], norm_weight + column);
  }
  // Shared memory of a CTA can be written once the CTA has started.
  if constexpr (kClusterSize > 1) cluster_sync_after_init<kClusterSize>();
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

  float* const h_row = h + token * kWidth;
  Vector<X, 8> deltas[kVectors] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = (j * THREADS + threadIdx.x) * 8;
    if (column >= kWidth) continue;
    load<true>(values[j], h_row + column);
    if constexpr (kHasDelta) load<true>(deltas[j], delta + token * kWidth + column);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kHasDelta) values[j].values[i] += to_float(deltas[j].values[i]);
      sum += values[j].values[i] * values[j].values[i];
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += warp_sums[i];
  const float inverse = 1.0f / sqrtf(sum / static_cast<float>(kWidth) + eps);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = (j * THREADS + threadIdx.x) * 8;
    if (column >= kWidth) continue;
    Vector<X, 8> normed;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      normed.values[i] = from_float<X>(values[j].values[i] * inverse * factors[j].values[i]);
    }
    store<true>(shared_x + column, normed);
    if (blockIdx.x == 0) store<true>(x + token * kWidth + column, normed);
  }
  __syncthreads();

#pragma unroll 1
  for (int expert = first_expert; expert < kExperts; expert += kCtas * kWarps) {
    float logit = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kWidth; first += kAhead * 256) {
      if (expert != first_expert || first > 0) fetch(expert, first);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int column = first + (i * 32 + lane) * 8;
        if (column >= kWidth) continue;
        Vector<X, 8> a, b = *reinterpret_cast<const Vector<X, 8>*>(&ahead[i]);
        load<true>(a, shared_x + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) logit += to_float(a.values[e]) * to_float(b.values[e]);
      }
    }
    logit = warp_sum(logit);
    if (lane > 0) continue;
    if constexpr (kClusterSize > 1) {
      const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(sent_logits + expert));
      ptx::st_shared_cluster(ptx::mapa(target, 0), logit);
    } else {
      __stcg(logits + token * kExperts + expert, logit);
    }
  }

  bool chooses, stores_h;
  if constexpr (kClusterSize > 1) {
    cluster_sync<kClusterSize>();
    chooses = blockIdx.x == 0;
    stores_h = blockIdx.x == kCtas - 1;
  } else {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(counters + token, 1u) == kCtas - 1;
      if (is_last) counters[token] = 0;
    }
    __syncthreads();
    chooses = stores_h = is_last;
    __threadfence();
  }
  if (chooses && warp == 0) {
    auto logit = [&](int e) { return kClusterSize > 1 ? sent_logits[e] : __ldcg(logits + token * kExperts + e); };
    choose_token_experts(logit, bias, ids + token * top_k, weights + token * top_k, top_k, kept, scale, storage);
  }
  if (!kHasDelta || !stores_h) return;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = (j * THREADS + threadIdx.x) * 8;
    if (column < kWidth) store<true>(h_row + column, values[j]);
  }
}
