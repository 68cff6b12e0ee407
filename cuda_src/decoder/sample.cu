// SPDX-License-Identifier: Apache-2.0
// Selects the next token of each row:
//
//   adjusted = logit + offset (PENALTY): bias, presence and frequency penalty of the token
//   penalized = adjusted > 0 ? adjusted / penalty : adjusted * penalty, for seen tokens (PENALTY); else adjusted
//   scaled = penalized / temperature
//   sample_token without SAMPLES   token = argmax of penalized; of equal values, the smallest token
//   sample_token with SAMPLES      token = argmax of scaled + noise over all tokens with scaled >= limit
//   sampling_threshold             limit = the smallest scaled value that top-k, then top-p, then min-p keep
//
// noise = -log(-log(u)) is Gumbel noise; u is a hash of seed, choice, position and token. The argmax is then a sample
// from the softmax of the scaled values. At temperature 0 the token is the argmax, also with SAMPLES.
//
//   logits       float32 [rows, vocab]
//   seen         uint8 [slots, vocab], the sum of 1 for the tokens of the text so far and 2 for those that the sequence
//                has generated; with PENALTY only. sample_token also sets both for the new token of a slot whose
//                penalty is not 1 or that has offsets.
//   offsets      float32 [slots, vocab], valid for slots that have offsets; with PENALTY only. sample_token subtracts
//                from that of the new token the frequency penalty, and the presence penalty at its first occurrence.
//   limits       float32 [rows]; null if sample_token may sample every token
//   slots        int32 [rows], the slot of each row: its sequence
//   options      Options [slots]
//   tokens       int32 [slots], the new tokens; -1 if the logits contain NaN
//   lengths      int32 [rows], the position before that of the new token
//   partials     uint64 [rows, CTAs], the maximum of each CTA
//   counters     uint32 [rows], zero before and after the launch
//   host_tokens  int32 [rows] in pinned host memory, the new tokens
//
// Limits: with PENALTY, rows with equal slots only if their penalty is 1 and they have no offsets. Architectures: all.
// Grids: (CTAs, rows) for sample_token, (1, rows) for sampling_threshold.
#include "decoder/dependent_launch.cuh"

constexpr bool kSamples = SAMPLES;
constexpr bool kPenalty = PENALTY;
constexpr int kWarps = THREADS / 32;
constexpr int kVectors = kSamples || kPenalty ? 1 : 3;  // number of loads in flight per thread; more would spill

// Returns an integer key of a value: keys are ordered like the values, with NaN as the largest.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The finalizer of splitmix64 (Steele, Lea and Flood, 2014), a 64-bit hash.
__device__ __forceinline__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;  // the increment of splitmix64, 2^64 divided by the golden ratio

// The options of one sequence; choice is the index of the completion.
struct Options {
  uint64_t seed;
  int32_t choice, top_k;
  float temperature, top_p, log_min_p, penalty, presence, frequency;
  int64_t has_offsets;
};

struct Logits {
  const float* row;
  const uint8_t* seen;
  const float* offsets;  // null without any
  float temperature, penalty;

  __device__ __forceinline__ float operator()(int token) const { return transform(token, row[token]); }

  // Returns the value of a logit after offset, repetition penalty and temperature.
  __device__ __forceinline__ float transform(int token, float value) const {
    if constexpr (kPenalty) {
      if (offsets) value += offsets[token];
      if (seen[token]) value = value > 0.0f ? value / penalty : value * penalty;
    }
    return kSamples && temperature > 0.0f ? value / temperature : value;
  }
};

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// Returns the maximum of `value` over all threads of the CTA, to every thread.
__device__ __forceinline__ uint64_t cta_max(uint64_t value, uint64_t* shared) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) value = shared[warp] > value ? shared[warp] : value;
  __syncthreads();
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_token(const float* logits, uint8_t* seen, float* offsets, const float* limits, const int32_t* slots,
                 const Options* options, int32_t* tokens, const int32_t* lengths, uint64_t* partials,
                 uint32_t* counters, int32_t* host_tokens, int vocab) {
  __shared__ uint64_t shared[kWarps];
  __shared__ bool is_last;
  launch_dependents_and_wait();
  const int row = blockIdx.y, ctas = gridDim.x;
  const int slot = slots[row];
  const Options own = options[slot];
  uint8_t* const own_seen = seen + static_cast<int64_t>(slot) * vocab;
  float* const own_offsets = own.has_offsets ? offsets + static_cast<int64_t>(slot) * vocab : nullptr;
  const Logits values{logits + static_cast<int64_t>(row) * vocab, own_seen, own_offsets, own.temperature, own.penalty};
  const uint64_t position = lengths[row] + 1;  // that of the token that is chosen now
  const uint64_t hash = mix(own.seed + (static_cast<uint64_t>(own.choice) << 32 | position) * kStep);
  const bool adds_noise = own.temperature > 0.0f;
  const float limit = kSamples && limits ? limits[row] : __int_as_float(0xff800000);  // minus infinity: no limit
  uint64_t best = 0;
  auto consider = [&](int token, float logit) {
    float value = values.transform(token, logit);
    if constexpr (kSamples) {
      if (value < limit) return;
      const auto bits = static_cast<uint32_t>(mix(hash + token * kStep) >> 41);
      // The factor 2^-23 makes a random number within (0, 1).
      const float uniform = (static_cast<float>(bits) + 0.5f) * 1.1920928955078125e-7f;
      if (adds_noise) value += -logf(-logf(uniform));
    }
    // Among equal values, the low word of the key makes the smallest token win.
    const uint64_t key = static_cast<uint64_t>(key_of(value)) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
    best = key > best ? key : best;
  };
  // Load the logits of four tokens at a time, from the last 16-byte boundary at or before the start of the row.
  const int misaligned = static_cast<int>(reinterpret_cast<uint64_t>(values.row) / sizeof(float) % 4);
  const int step = 4 * THREADS * ctas;
  for (int first = 4 * (blockIdx.x * THREADS + threadIdx.x) - misaligned; first < vocab; first += kVectors * step) {
    Vector<float, 4> vectors[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int begin = first + j * step;
      if (begin >= 0 && begin <= vocab - 4) {
        load<true>(vectors[j], values.row + begin);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (begin + e >= 0 && begin + e < vocab) vectors[j].values[e] = values.row[begin + e];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = first + j * step + e;
        if (token >= 0 && token < vocab) consider(token, vectors[j].values[e]);
      }
    }
  }
  best = cta_max(best, shared);
  uint64_t* row_partials = partials + static_cast<int64_t>(row) * ctas;
  if (threadIdx.x == 0) {
    __stcg(reinterpret_cast<unsigned long long*>(row_partials) + blockIdx.x, best);
    __threadfence();
    is_last = atomicAdd(counters + row, 1u) == ctas - 1;
    if (is_last) counters[row] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  best = 0;
  for (int i = threadIdx.x; i < ctas; i += THREADS) {
    const uint64_t other = __ldcg(reinterpret_cast<const unsigned long long*>(row_partials) + i);
    best = other > best ? other : best;
  }
  best = cta_max(best, shared);
  if (threadIdx.x == 0) {
    const bool is_nan = (best >> 32) == 0xffffffffu;
    const int token = is_nan ? -1 : static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    tokens[slot] = token;
    host_tokens[row] = token;
    if (kPenalty && (own_offsets || own.penalty != 1.0f) && !is_nan) {
      if (own_offsets) {
        const float first = own_seen[token] & 2 ? 0.0f : own.presence;
        own_offsets[token] = own_offsets[token] - first - own.frequency;
      }
      own_seen[token] = 3;
    }
  }
}

// The shared memory of find_threshold: a histogram and what threads pass to each other.
struct RadixSelect {
  unsigned long long bins[256];
  unsigned long long wanted;
  uint32_t digit;
};

// Returns the largest value v such that the weights of all values >= v sum to at least `wanted`: a radix select over
// the 8-bit digits of the keys, highest digit first. Weights are integers, so the sum does not depend on its order.
template <class Weight> __device__ __forceinline__ float find_threshold(const Logits& values, int vocab,
                                                                        unsigned long long wanted, Weight weight,
                                                                        RadixSelect& shared) {
  uint32_t prefix = 0, mask = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += THREADS) shared.bins[i] = 0;
    __syncthreads();
    for (int token = threadIdx.x; token < vocab; token += THREADS) {
      const float value = values(token);
      const uint32_t key = key_of(value);
      if ((key & mask) == prefix) atomicAdd(&shared.bins[key >> shift & 255u], weight(value));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int i = 255;
      for (; i > 0 && shared.bins[i] < wanted; --i) wanted -= shared.bins[i];
      shared.digit = i;
      shared.wanted = wanted;
    }
    __syncthreads();
    prefix |= shared.digit << shift;
    mask |= 255u << shift;
    wanted = shared.wanted;
    __syncthreads();
  }
  return value_of(prefix);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sampling_threshold(const float* logits, uint8_t* seen, float* offsets, float* limits, const int32_t* slots,
                       const Options* options, int vocab) {
  __shared__ uint64_t shared[kWarps];
  __shared__ RadixSelect radix_select;
  launch_dependents_and_wait();
  const int slot = slots[blockIdx.y];
  const Options own = options[slot];
  if (own.temperature == 0.0f || (own.top_k == 0 && own.top_p == 1.0f && isinf(own.log_min_p))) {
    if (threadIdx.x == 0) limits[blockIdx.y] = __int_as_float(0xff800000);  // minus infinity keeps all tokens
    return;
  }
  const int64_t row = static_cast<int64_t>(slot) * vocab;
  const Logits values{logits + static_cast<int64_t>(blockIdx.y) * vocab, seen + row,
                      own.has_offsets ? offsets + row : nullptr, own.temperature, own.penalty};
  uint64_t highest = 0;
  for (int token = threadIdx.x; token < vocab; token += THREADS) {
    const uint64_t key = key_of(values(token));
    highest = key > highest ? key : highest;
  }
  const float top = value_of(static_cast<uint32_t>(cta_max(highest, shared)));

  float limit = __int_as_float(0xff800000);  // minus infinity keeps all tokens
  if (own.top_k > 0 && own.top_k < vocab) {
    limit = find_threshold(values, vocab, own.top_k, [](float) { return 1ull; }, radix_select);
  }
  if (own.top_p < 1.0f) {
    // Returns the probability relative to the highest probability, as an integer in units of 2^-40.
    auto mass = [&](float value) {
      return value >= limit ? static_cast<unsigned long long>(expf(value - top) * 1.099511627776e12f) : 0ull;
    };
    if (threadIdx.x == 0) radix_select.wanted = 0;
    __syncthreads();
    unsigned long long thread_mass = 0;
    for (int token = threadIdx.x; token < vocab; token += THREADS) thread_mass += mass(values(token));
    atomicAdd(&radix_select.wanted, thread_mass);
    __syncthreads();
    const auto share = static_cast<unsigned long long>(static_cast<double>(radix_select.wanted) * own.top_p);
    const auto wanted = max(1ull, share);  // a mass of 0 would keep every token
    __syncthreads();
    limit = find_threshold(values, vocab, wanted, mass, radix_select);
  }
  limit = fmaxf(limit, top + own.log_min_p);
  if (threadIdx.x == 0) limits[blockIdx.y] = limit;
}
