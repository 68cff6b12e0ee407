// SPDX-License-Identifier: Apache-2.0
// The memory traffic of y = x @ W without the arithmetic: reads the weight and x, and writes as many bytes as y has.
//
//   weight[weight_vectors], x[x_vectors], y[y_vectors]: vectors of 16 bytes
//
// As in the GEMM kernels, the weight is read before the preceding kernel has finished. Any grid works.
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld.cuh"

constexpr int kUnroll = 8;  // number of 16-byte loads in flight per thread

// XORs the vectors that belong to this thread, so that the compiler cannot drop the loads.
__device__ __forceinline__ void read(unsigned (&sum)[4], const uint4* source, long long vectors) {
  const long long stride = static_cast<long long>(gridDim.x) * THREADS;
  for (long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; first < vectors;
       first += kUnroll * stride) {
    unsigned loaded[kUnroll][4] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * stride < vectors) ptx::ld_global_no_allocate(loaded[i], source + first + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] ^= loaded[i][j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    plain_read(const uint4* weight, const uint4* x, uint4* y, long long weight_vectors, long long x_vectors,
               long long y_vectors) {
  ptx::griddepcontrol_launch_dependents();
  unsigned sum[4] = {};
  read(sum, weight, weight_vectors);
  ptx::griddepcontrol_wait();
  read(sum, x, x_vectors);
  const long long stride = static_cast<long long>(gridDim.x) * THREADS;
  for (long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; i < y_vectors; i += stride) {
    y[i] = make_uint4(sum[0], sum[1], sum[2], sum[3]);
  }
}
