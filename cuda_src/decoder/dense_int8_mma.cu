// SPDX-License-Identifier: Apache-2.0
// A GEMM with a weight of 8-bit codes and 16-bit activations, on tensor cores (dense_mma.cuh):
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n],  w[n, k] = (codes[n, k] - 128) * code_scales[n, k / BLOCK]
//
//   x            X [m, k]
//   codes        uint8 [n, k]
//   code_scales  X [n, k / BLOCK]
//   bias         float32 [n] (HAS_BIAS), or null
//   y            Y [m, n]
//
// Each weight is rounded once to X, so y equals the result of dense_mma with the dequantized weight.
// Limits: k a multiple of BLOCK, BLOCK a multiple of 16. Architectures: sm_75 and newer; bfloat16 sm_80 and newer.
#include "decoder/dense_mma.cuh"
#include "dequantize/unpack_bytes.cuh"

static_assert(BLOCK % 16 == 0, "a lane's values of one step have one scale");

struct Weight {
  static constexpr int kLaneK = 16;
  struct Loaded {
    Chunk codes;
    uint32_t scales;  // the block's scale, in both halves of a register
  };

  __device__ __forceinline__ void load(Loaded& out, int column, int k_begin) const {
    ptx::ld_global_no_allocate(out.codes.values, codes + static_cast<int64_t>(column) * k + k_begin);
    out.scales = code_scales[static_cast<int64_t>(column) * (k / BLOCK) + k_begin / BLOCK].bits * 0x10001u;
  }
  __device__ __forceinline__ void pairs(uint32_t (&out)[2], const Loaded& loaded, int i) const {
    // Exchanges bytes 1 and 2, which unpack_bytes expects in the order 0, 2, 1, 3.
    unpack_bytes<X>(out, __byte_perm(loaded.codes.values[i], 0, 0x3120));
    out[0] = Codes<X>::multiply(out[0], loaded.scales);
    out[1] = Codes<X>::multiply(out[1], loaded.scales);
  }

  const uint8_t* codes;
  const X* code_scales;
  int k;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_int8_mma(const X* x, const uint8_t* codes, const X* code_scales, const float* bias, Y* y, int m, int n,
                   int k) {
  multiply_dense(x, Weight{codes, code_scales, k}, bias, y, m, n, k);
}
