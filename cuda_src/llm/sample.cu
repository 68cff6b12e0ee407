// SPDX-License-Identifier: Apache-2.0
// The next token of each sequence.
//   penalised = logits, or for tokens that were seen, logits / penalty if positive, else logits * penalty  (PENALTY)
//   choose:       token = argmax of penalised, the first of equal ones
//                 token = argmax over scaled >= limit of scaled + noise,  scaled = penalised / temperature   (SAMPLES)
//   choose_limit: limit = what top-k, then top-p, then min-p leave of scaled
// The noise is Gumbel's, -log(-log(u)), of a hash of seed, sequence, position and token: the largest sum falls on each
// token with its probability.
//
//   logits    float32 [sequences, vocab]
//   seen      uint8 [sequences, vocab]: the tokens of each text so far; choose adds its token
//   limits    float32 [sequences]
//   tokens    int32 [sequences]: choose writes here; -1 where the logits hold NaN
//   lengths   int32 [sequences]: the position that is chosen for, less one; choose adds 1 (ADVANCE)
//   partials  uint64 [sequences, blocks]; counters uint32 [sequences], zeros before and after
//   host_tokens   int32 [sequences, 2], in memory that the host reads: the token once more, at [.., position % 2], where it
//             stays until the step after the next one (ADVANCE)
//
// Any architecture. choose: grid (blocks, sequences), of which the first is number first_sequence of the batch;
// choose_limit: grid (1, sequences).
#include "llm/begin.cuh"

constexpr bool kSamples = SAMPLES;
constexpr bool kPenalty = PENALTY;
constexpr bool kAdvance = ADVANCE;
constexpr int kWarps = THREADS / 32;
constexpr int kVectors = kSamples || kPenalty ? 1 : 3;  // loads of a thread under way at once; more would spill

// Keys are ordered as their values are; NaN is above all.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
__device__ __forceinline__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;

struct Logits {
  const float* row;
  const uint8_t* seen;
  float temperature, penalty;

  __device__ __forceinline__ float operator()(int token) const { return of(token, row[token]); }

  // What becomes of the logit `value`.
  __device__ __forceinline__ float of(int token, float value) const {
    if constexpr (kPenalty) {
      if (seen[token]) value = value > 0.0f ? value / penalty : value * penalty;
    }
    return kSamples ? value / temperature : value;
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

// The largest value of the block, for all its threads.
__device__ __forceinline__ uint64_t block_max(uint64_t value, uint64_t* shared) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) value = shared[warp] > value ? shared[warp] : value;
  __syncthreads();
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const float* logits, uint8_t* seen, const float* limits, int32_t* tokens, int32_t* lengths,
           uint64_t* partials, uint32_t* counters, int32_t* host_tokens, int vocab, int first_sequence, uint64_t seed,
           float temperature, float penalty) {
  __shared__ uint64_t shared[kWarps];
  __shared__ bool is_last;
  begin();
  const int row = blockIdx.y, blocks = gridDim.x;
  const int64_t start = static_cast<int64_t>(row) * vocab;
  const Logits values{logits + start, seen + start, temperature, penalty};
  // Of the position of the new token: those before it are in the cache, or about to be.
  const uint64_t position = lengths[row] + (kAdvance ? 1 : 0);
  const uint64_t hash = mix(seed + (static_cast<uint64_t>(first_sequence + row) << 32 | position) * kStep);
  const float limit = kSamples && limits ? limits[row] : __int_as_float(0xff800000);
  uint64_t best = 0;
  auto take = [&](int token, float logit) {
    float value = values.of(token, logit);
    if constexpr (kSamples) {
      if (value < limit) return;
      const auto bits = static_cast<uint32_t>(mix(hash + token * kStep) >> 41);
      const float uniform = (static_cast<float>(bits) + 0.5f) * 1.1920928955078125e-7f;  // 2^-23
      value += -logf(-logf(uniform));
    }
    const uint64_t key = static_cast<uint64_t>(key_of(value)) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
    best = key > best ? key : best;
  };
  // Four tokens at a time, from the last multiple of 16 bytes that is not behind the row's begin.
  const int before = static_cast<int>(reinterpret_cast<uint64_t>(values.row) / sizeof(float) % 4);
  const int step = 4 * THREADS * blocks;
  for (int first = 4 * (blockIdx.x * THREADS + threadIdx.x) - before; first < vocab; first += kVectors * step) {
    Vector<float, 4> parts[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int begin = first + j * step;
      if (begin >= 0 && begin <= vocab - 4) {
        load<true>(parts[j], values.row + begin);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (begin + e >= 0 && begin + e < vocab) parts[j].values[e] = values.row[begin + e];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = first + j * step + e;
        if (token >= 0 && token < vocab) take(token, parts[j].values[e]);
      }
    }
  }
  best = block_max(best, shared);
  uint64_t* mine = partials + static_cast<int64_t>(row) * blocks;
  if (threadIdx.x == 0) {
    __stcg(reinterpret_cast<unsigned long long*>(mine) + blockIdx.x, best);
    __threadfence();
    is_last = atomicAdd(counters + row, 1u) == blocks - 1;
    if (is_last) counters[row] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  best = 0;
  for (int i = threadIdx.x; i < blocks; i += THREADS) {
    const uint64_t other = __ldcg(reinterpret_cast<const unsigned long long*>(mine) + i);
    best = other > best ? other : best;
  }
  best = block_max(best, shared);
  if (threadIdx.x == 0) {
    const bool is_nan = (best >> 32) == 0xffffffffu;
    const int token = is_nan ? -1 : static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    tokens[row] = token;
    if (kPenalty && !is_nan) seen[start + token] = 1;
    if constexpr (kAdvance) {
      host_tokens[2 * row + position % 2] = token;
      lengths[row] = static_cast<int32_t>(position);
    }
  }
}

// What the threads of `descend` share.
struct Digits {
  unsigned long long bins[256];
  unsigned long long wanted;
  uint32_t digit;
};

// The largest value at which the weights of all values from it upward reach what is wanted: digit by digit of its key,
// from the highest. Weights are integers, so that the order in which threads add them changes nothing.
template <class Weight>
__device__ __forceinline__ float descend(const Logits& values, int vocab, unsigned long long wanted, Weight weight,
                                         Digits& shared) {
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

extern "C" __global__ void __launch_bounds__(THREADS)
    choose_limit(const float* logits, uint8_t* seen, float* limits, int vocab, int top_k, float temperature,
                 float penalty, float top_p, float log_min_p) {
  __shared__ uint64_t shared[kWarps];
  __shared__ Digits digits;
  begin();
  const int64_t start = static_cast<int64_t>(blockIdx.y) * vocab;
  const Logits values{logits + start, seen + start, temperature, penalty};
  uint64_t highest = 0;
  for (int token = threadIdx.x; token < vocab; token += THREADS) {
    const uint64_t key = key_of(values(token));
    highest = key > highest ? key : highest;
  }
  const float top = value_of(static_cast<uint32_t>(block_max(highest, shared)));

  float limit = __int_as_float(0xff800000);
  if (top_k > 0 && top_k < vocab) limit = descend(values, vocab, top_k, [](float) { return 1ull; }, digits);
  if (top_p < 1.0f) {
    // Probabilities relative to the highest, in units of 2^-40.
    auto mass = [&](float value) {
      return value >= limit ? static_cast<unsigned long long>(expf(value - top) * 1.099511627776e12f) : 0ull;
    };
    if (threadIdx.x == 0) digits.wanted = 0;
    __syncthreads();
    unsigned long long mine = 0;
    for (int token = threadIdx.x; token < vocab; token += THREADS) mine += mass(values(token));
    atomicAdd(&digits.wanted, mine);
    __syncthreads();
    const auto wanted = static_cast<unsigned long long>(static_cast<double>(digits.wanted) * top_p);
    __syncthreads();
    limit = descend(values, vocab, wanted, mass, digits);
  }
  limit = fmaxf(limit, top + log_min_p);
  if (threadIdx.x == 0) limits[blockIdx.y] = limit;
}
