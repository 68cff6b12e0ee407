// SPDX-License-Identifier: Apache-2.0
// y[m, n] = sum over k of x[m, k] * w[n, k] for float16 x and w, float y: a producer warp copies 64-wide tiles of K by
// TMA with 128-byte swizzle, two warpgroups of 64 rows each multiply. FROM_REGISTERS: x goes through ldmatrix.
#include "hopper.cuh"

constexpr int kBlockM = 128;
constexpr int kBlockN = 64;
constexpr int kBlockK = 64;
constexpr int kStages = 2;

struct Stage {
  uint16_t x[kBlockM * kBlockK];
  uint16_t w[kBlockN * kBlockK];
};

struct Shared {
  Stage stages[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

#define SUMS(c)                                                                                                    \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),      \
      "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),       \
      "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),      \
      "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define NUMBERS                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "     \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}"

__device__ __forceinline__ void multiply(float (&c)[32], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NUMBERS ", %32, %33, 1, 1, 1, 0, 0;"
               : SUMS(c)
               : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NUMBERS ", {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : SUMS(c)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

extern "C" __global__ void __launch_bounds__(384)
    wgmma(float* y, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = threadIdx.x / 128;
  const int steps = k / kBlockK;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], 256);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x != 256) return;
    for (int step = 0; step < steps; ++step) {
      const int i = step % kStages;
      if (step >= kStages) mbarrier_wait(&shared.empty[i], (step / kStages - 1) & 1);
      mbarrier_arrive_expect_tx(&shared.full[i], sizeof(Stage));
      tensor_load(shared.stages[i].x, &x, step * kBlockK, blockIdx.x * kBlockM, &shared.full[i]);
      tensor_load(shared.stages[i].w, &w, step * kBlockK, blockIdx.y * kBlockN, &shared.full[i]);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;
  float sums[32] = {};
  for (int step = 0; step < steps; ++step) {
    const int i = step % kStages;
    mbarrier_wait(&shared.full[i], step / kStages & 1);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kBlockK / 16; ++j) {
      const uint64_t b = descriptor(shared.stages[i].w + j * 16, 0, 1024, 1);
#if FROM_REGISTERS
      uint32_t a[4];
      const int row = warp_row + lane % 16;
      const int chunk = (j * 2 + lane / 16) ^ (row & 7);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                   : "r"(shared_address(shared.stages[i].x + row * kBlockK + chunk * 8)));
      multiply(sums, a, b);
#else
      multiply(sums, descriptor(shared.stages[i].x + warpgroup * 64 * kBlockK + j * 16, 0, 1024, 1), b);
#endif
    }
    wgmma_commit();
    wgmma_wait<0>();
    mbarrier_arrive(&shared.empty[i]);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = blockIdx.x * kBlockM + warp_row + lane / 4 + (i >> 1 & 1) * 8;
    const int column = blockIdx.y * kBlockN + i / 4 * 8 + lane % 4 * 2 + (i & 1);
    y[row * n + column] = sums[i];
  }
}
