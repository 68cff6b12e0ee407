// SPDX-License-Identifier: Apache-2.0
// Microbenchmarks of a GPU's rates for `tune --rates`; no operation. KIND selects what a launch does:
//
//   kRead     read source[vectors] rounds times with all threads, from device memory or, if it is small, from L2
//   kChase    one thread follows rounds links: source[i].x is the next i
//   kMma...   each warp issues rounds * kChains mma.sync from registers
//
// source: uint4 [vectors]; sink: unsigned [1], which is written only so that no result is unused. sm_75 and newer.
#include "ptx/mma.cuh"
#include "ptx/mma_e4m3.cuh"
#include "ptx/mma_s8.cuh"

enum Kind { kRead, kChase, kMmaM16N8K8, kMmaM16N8K16, kMmaM8N8K16S8, kMmaM16N8K32S8, kMmaM16N8K32E4M3 };

constexpr int kChains = 8;  // number of independent accumulators per warp, which hide the latency of mma
constexpr int kUnroll = 8;  // number of 16-byte loads in flight per thread

struct Config {
  static constexpr Kind kKind = KIND;
};

// Returns the xor of all vectors that this thread reads.
__device__ __forceinline__ unsigned read(const uint4* source, long long vectors, int rounds) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (int round = 0; round < rounds; ++round) {
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors;
         i += kUnroll * stride) {
      uint4 loaded[kUnroll] = {};
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        // __ldcg reads through L2 and never from L1.
        if (i + j * stride < vectors) loaded[j] = __ldcg(source + i + j * stride);
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) sum ^= loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
    }
  }
  return sum;
}

// Issues one mma of the kind Config::kKind for each accumulator.
template <typename C> __device__ __forceinline__ unsigned multiply(int rounds) {
  constexpr bool kIsInteger = C::kKind == kMmaM8N8K16S8 || C::kKind == kMmaM16N8K32S8;
  float sums[kChains][4] = {};
  int counts[kChains][4] = {};
  unsigned a[4] = {threadIdx.x, threadIdx.x, threadIdx.x, threadIdx.x};
  for (int round = 0; round < rounds; ++round) {
    // Operands differ by round and chain: sm_90 adds products of e4m3 by separate instructions, and ptxas would move
    // equal products out of the loop.
    a[0] = round;
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      const unsigned b = threadIdx.x + chain;
      if constexpr (C::kKind == kMmaM16N8K8) ptx::mma_m16n8k8_f16(sums[chain], a[0], a[1], b);
      if constexpr (C::kKind == kMmaM16N8K16) ptx::mma_m16n8k16_f16(sums[chain], a, b, b);
      if constexpr (C::kKind == kMmaM16N8K32E4M3) ptx::mma_m16n8k32_e4m3(sums[chain], a, b, b);
      if constexpr (C::kKind == kMmaM8N8K16S8) ptx::mma_m8n8k16_s8(counts[chain][0], counts[chain][1], a[0], b);
      if constexpr (C::kKind == kMmaM16N8K32S8) ptx::mma_m16n8k32_s8(counts[chain], a, b, b);
    }
  }
  unsigned sum = 0;
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) {
    sum ^= kIsInteger ? static_cast<unsigned>(counts[chain][0]) : __float_as_uint(sums[chain][0]);
  }
  return sum;
}

template <typename C> __device__ __forceinline__ unsigned run(const uint4* source, long long vectors, int rounds) {
  if constexpr (C::kKind == kRead) return read(source, vectors, rounds);
  if constexpr (C::kKind > kChase) return multiply<C>(rounds);
  unsigned at = 0;
  for (int round = 0; round < rounds; ++round) at = source[at].x;
  return at;
}

extern "C" __global__ void rates(const uint4* source, unsigned* sink, long long vectors, int rounds) {
  const unsigned sum = run<Config>(source, vectors, rounds);
  if (sum == 0x9e3779b9u) *sink = sum;
}
