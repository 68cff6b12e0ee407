// SPDX-License-Identifier: Apache-2.0
// Rounds a block of input channels of a weight one after the other, as GPTQ and coordinate descent do:
//
//   codes[j, n]   = clamp(round_half_even(target[j, n]), bottom[n], top[n])
//   changes[j, n] = codes[j, n] - old[j, n]
//   target[k, n] -= factors[j, k] * changes[j, n]      for all k > j, before channel j + 1 is rounded
//
//   target       float32 [CHANNELS, n]; only read, the updated values stay in registers
//   old          float32 [CHANNELS, n], or null, which stands for the updated target
//   factors      float32 [CHANNELS, CHANNELS]
//   bottom, top  float32 [n]
//   codes, changes  float32 [CHANNELS, n]
//
// Every operation is rounded to float32, without FMA, so the results equal NumPy's. All arrays are contiguous.
// Limits: CHANNELS is at most 64. Architectures: all. Each thread rounds the channels of one column n.
#include "common/types.cuh"

constexpr int kChannels = CHANNELS;
constexpr int kThreads = THREADS;
constexpr int kVectors = ceil_div(kChannels, 4);

static_assert(kChannels <= 64, "a thread keeps the targets of all channels in registers");

using Vector4 = Vector<float, 4>;

extern "C" __global__ void __launch_bounds__(THREADS)
    round_channels(const float* __restrict__ target, const float* __restrict__ old, const float* __restrict__ factors,
                   const float* __restrict__ bottom, const float* __restrict__ top, float* __restrict__ codes,
                   float* __restrict__ changes, int n) {
  // later[j][i] is the factor of the change of channel j for the target of channel j + 1 + i; 0 past the last channel.
  __shared__ alignas(16) float later[kChannels][4 * kVectors];
  for (int index = threadIdx.x; index < kChannels * 4 * kVectors; index += kThreads) {
    const int j = index / (4 * kVectors);
    const int k = j + 1 + index % (4 * kVectors);
    later[j][k - j - 1] = k < kChannels ? factors[j * kChannels + k] : 0.0f;
  }
  __syncthreads();
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= n) return;

  // At step j, targets[i] belongs to channel j + i: the targets move by one position per step, so that all indices of
  // the array are constants and it stays in registers.
  float targets[4 * kVectors + 1] = {};
#pragma unroll
  for (int j = 0; j < kChannels; ++j) targets[j] = target[static_cast<int64_t>(j) * n + column];
  const float least = bottom[column];
  const float most = top[column];
  float next_old = old == nullptr ? 0.0f : old[column];
#pragma unroll 1
  for (int j = 0; j < kChannels; ++j) {
    const int64_t at = static_cast<int64_t>(j) * n + column;
    const float before = old == nullptr ? targets[0] : next_old;
    if (old != nullptr && j + 1 < kChannels) next_old = old[at + n];
    const float code = fminf(fmaxf(rintf(targets[0]), least), most);
    const float change = __fsub_rn(code, before);
    codes[at] = code;
    changes[at] = change;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Vector4 factor;
      load<true>(factor, &later[j][4 * v]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        targets[4 * v + i] = __fsub_rn(targets[4 * v + i + 1], __fmul_rn(factor.values[i], change));
      }
    }
  }
}
