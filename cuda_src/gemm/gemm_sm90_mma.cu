// SPDX-License-Identifier: Apache-2.0
// The GEMM of gemm_sm90.cuh with mma m16n8k16, for up to 16 rows of x. For so few rows mma is faster: a wgmma takes as
// long for 1 row as for 16, and warps that need no warpgroup can each compute their own slice of K.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//
//   weight, bias, residual, y   as in gemm_sm90.cuh
//   x       X [m, k], row stride ldx values; rows start at multiples of 16 bytes
//   order   with GATHER_X: uint16 [k], a permutation, aligned to 16 bytes; the kernel multiplies x[m, order[k]]
//
// Limits: as for gemm_sm90.cuh, and m <= 16; sm_90 and newer. A consumer has one warp per tile column; the warp
// computes 32 columns of the CTA tile for all BLOCK_M rows. Consumers copy x themselves with cp.async, which has a
// lower latency than TMA for few rows. With GATHER_X, each CTA copies whole rows of x to shared memory, from where its
// consumers gather their columns.
//
// Zero points: operand A holds q plus a constant (RawCodes). The scale and the zero point of a group are applied to its
// float32 accumulators:
//
//   s * (sum of x * q - z * sum of x)
//
// The tensor cores also compute the sum of x, as a product with ones. With one or two rows of x, most columns of
// operand B would be unused. These columns hold other slices of K instead, so that one mma per row sums x over a whole
// weight tile (kSliced); each lane accumulates s * z * sum of x over its slices to the end of K. The terms that cancel
// are then sums over the consumer's K instead of a group: up to 15 times (bfloat16: 143 times) the sum of x * scale.
// The resulting error is at most 6e-4 of the RMS of y, for K = 28672 and bfloat16 x that are all positive.
#include "gemm/gemm_sm90_config.cuh"
#include "gemm/gemm_sm90_x_ring.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/st_shared.cuh"

static_assert(__CUDA_ARCH__ >= 900, "gemm_sm90_mma needs sm_90");

struct Config : GemmSm90Config {
  static constexpr int kXRows = X_ROWS, kXStages = X_STAGES;
  static constexpr bool kGathersX = GATHER_X;
};

#if GATHER_X
#define ORDER_PARAMETER const uint16_t *order,
#define ORDER_ARGUMENT order
#else
#define ORDER_PARAMETER
#define ORDER_ARGUMENT nullptr
#endif

template <class Host> struct GemmSm90Mma : GemmSm90X<Host> {
  using Base = GemmSm90X<Host>;
  static constexpr int kM8Tiles = Host::kBlockM / 8;
  static constexpr int kN16Tiles = 2;  // number of 16-column mma tiles per weight tile
  static constexpr int kUnroll = kM8Tiles == 1 && Host::kCtasPerSm == 1 && Base::kThreads <= 320 ? 2 : 1;

  // Whether unused columns of operand B hold other slices of K. Such slices are no faster with more than two rows of x,
  // and with several groups per weight tile a lane would need the scales of all its slices.
  static constexpr bool kSliced = Host::kXRows <= 2 && Host::kGroups == 1;
  static constexpr int kRows = kSliced ? Host::kXRows : 2;  // number of rows of y per lane in each mma tile
  // A weight tile is multiplied in parts of at least 32 k, which one ldmatrix loads; a part has one or two groups.
  static constexpr int kParts = Host::kGroups < 4 ? Host::kGroups : 4;
  static constexpr int kPartGroups = Host::kGroups / kParts;
  // Whether a thread has enough registers (112, fewer for one row) to load the residual stream before the main loop.
  static constexpr bool kLoadsStreamEarly =
      Host::kXRows == 1 || (kM8Tiles == 1 && Host::kCtasPerSm * Base::kThreads < 512);

  static_assert(!kSliced || kM8Tiles == 1, "zero points are added to one tile of rows");
  static_assert(Host::kConsumerWarps == Host::kWeightTiles, "a warp computes the columns of one weight tile");
  static_assert(Host::kZeros != Zeros::kOffset, "only wgmma adds offsets");
};

// The x of a CTA's slice of K in its activation order. After SharedStorage, shared memory holds
//
//   | x [m][k] | order uint16 [slice of K] | gathered [iteration][row][kStageK], swizzled (swizzle.cuh) |
//
// A thread copies and uses the same indices, so the threads synchronize only twice: before and after the gather.
template <class C> class GatheredX {
  using T = typename C::T;

 public:
  // Starts to copy the order before griddepcontrol.wait, as no preceding kernel writes it, while the producer starts to
  // copy weights.
  static __device__ __forceinline__ void copy_order(const uint16_t* order, const Tile<C>& tile, int m, int k) {
    const int k_begin = tile.k_tile_begin * kWeightTileK;
    for (int column = threadIdx.x * 8; column < slice_columns(tile, k); column += C::kConsumerThreads * 8) {
      ptx::cp_async_16(order_address(tile, m, k, column), order + k_begin + column, 16);
    }
  }

  __device__ __forceinline__ GatheredX(const T* x, int ldx, const Tile<C>& tile, int consumer, int m, int k)
      : x_(x), ldx_(ldx), tile_(tile), consumer_(consumer), m_(m), k_(k) {}

  // Copies the x of this CTA's slice of K, and gathers it for all consumers in the activation order.
  __device__ __forceinline__ void begin() {
    const uint32_t rows = tile_.shared.begin + kRowsBegin;
    for (int row = 0; row < m_; ++row) {
      for (int column = threadIdx.x * 8; column < k_; column += C::kConsumerThreads * 8) {
        ptx::cp_async_16(rows + (row * k_ + column) * sizeof(T), x_ + static_cast<int64_t>(row) * ldx_ + column, 16);
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::barrier_sync(kBarrier, C::kConsumerThreads);
    const int columns = slice_columns(tile_, k_);
    const uint32_t gathered = order_address(tile_, m_, k_, columns);
    // The last weight tile may be longer than the slice; zeros fill it.
    for (int column = threadIdx.x * 8; column < ceil_div(columns, kWeightTileK) * kWeightTileK;
         column += C::kConsumerThreads * 8) {
      uint32_t indices[4] = {};  // pairs of uint16 indices into the row of x
      if (column < columns) ptx::ld_shared(indices, order_address(tile_, m_, k_, column));
      uint32_t words[C::kXRows][4] = {};
#pragma unroll
      for (int row = 0; row < C::kXRows; ++row) {
        if (row >= m_ || column >= columns) break;
        const uint32_t source = rows + row * k_ * sizeof(T);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t low = ptx::ld_shared_u16(source + (indices[i] & 0xffff) * sizeof(T));
          words[row][i] = low | ptx::ld_shared_u16(source + (indices[i] >> 16) * sizeof(T)) << 16;
        }
      }
      const uint32_t target = gathered + column / C::kStageK * kStageBytes;
      const int chunk = column % C::kStageK / 8;
#pragma unroll
      for (int row = 0; row < C::kXRows; ++row) {
        if (row >= m_) break;
        ptx::st_shared(target + (row * C::kXChunks + (chunk ^ swizzle_bits(row))) * 16, words[row]);
      }
    }
    ptx::barrier_sync(kBarrier, C::kConsumerThreads);
    next_ = gathered + consumer_ * kStageBytes;
  }

  // Returns the shared address of the gathered x for the consumer's next iteration.
  __device__ __forceinline__ uint32_t next() {
    const uint32_t begin = next_;
    next_ += C::kConsumers * kStageBytes;
    return begin;
  }

  __device__ __forceinline__ void end() const {}

 private:
  static constexpr uint32_t kStageBytes = C::kXRows * C::kXChunks * 16;
  static constexpr int kRowsBegin = ceil_div(C::SharedStorage::kBytes, 16) * 16;
  static constexpr int kBarrier = 1;  // index of the consumers' named barrier; sync_cta uses barrier 0

  static_assert(C::kM8Tiles == 1, "lanes past the last row of x load that row again");

  // Returns the number of columns of x (rows of W) in this CTA's slice of K.
  static __device__ __forceinline__ int slice_columns(const Tile<C>& tile, int k) {
    return min(k, tile.k_tile_end * kWeightTileK) - tile.k_tile_begin * kWeightTileK;
  }
  // Returns the shared address of the activation-order index for a column of the slice of K.
  static __device__ __forceinline__ uint32_t order_address(const Tile<C>& tile, int m, int k, int column) {
    return tile.shared.begin + kRowsBegin + m * k * sizeof(T) + column * sizeof(uint16_t);
  }

  const T* x_;
  int ldx_;
  const Tile<C>& tile_;
  int consumer_, m_, k_;
  uint32_t next_;
};

// The body of the kernel, for one configuration; x, ldx and order are arguments of `gemm_sm90_mma` below.
template <class C> __device__ __forceinline__ void gemm_sm90_mma_tile(const GemmArguments<C>& args,
                                                                      const typename C::T* x, int ldx,
                                                                      const uint16_t* order) {
  using T = typename C::T;
  const int m = args.m, k = args.k;
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int consumer = warp / C::kConsumerWarps;
  constexpr uint32_t kOnes[4] = {RawCodes<T>::kOnes[0], RawCodes<T>::kOnes[1], RawCodes<T>::kOnes[0],
                                 RawCodes<T>::kOnes[1]};
  float accumulators[C::kN16Tiles][C::kM8Tiles][4] = {};
  float zero_sums[C::kN16Tiles][4] = {};  // with kSliced: -s * z * sum of x over this lane's slices of K

  auto prefetch = [&](const Tile<C>& tile) {
    if constexpr (C::kGathersX) GatheredX<C>::copy_order(order, tile, m, k);
    prefetch_x(tile, x, ldx, m, k);
  };
  auto accumulate = [&](const Tile<C>& tile) {
    Select<C::kGathersX, GatheredX<C>, XRing<C>> ring(x, ldx, tile, consumer, m, k);
    const auto pipeline = tile.shared.pipeline();
    // The shared addresses of this lane's codes, scales and zero points in stage 0, and the byte offsets of this lane's
    // operands in a stage of x.
    const uint32_t weight_tile = tile.shared.weight(0) + warp % C::kConsumerWarps * C::kKTiles * C::kWeightTileBytes;
    const uint32_t my_codes = ptx::opaque(weight_tile + lane * 16);
    const uint32_t my_scales = ptx::opaque(weight_tile + kCodeBytes + lane / 4 * 4);
    const uint32_t my_zeros = ptx::opaque(weight_tile + kCodeBytes + 32 + lane / 4 * 2);
    const int x_row = min(lane % 8, (C::kGathersX ? m : C::kXRows) - 1);
    const uint32_t my_x = ptx::opaque((x_row * C::kXChunks + (lane / 8 ^ swizzle_bits(x_row))) * 16);
    const uint32_t my_other_x = ptx::opaque(my_x ^ 64);
    // With kSliced, row i of an 8 x 8 matrix of operand B is row i % kXRows of x in slice i / kXRows of K; the order of
    // the slices avoids bank conflicts.
    const int sliced_row = lane % C::kXRows;
    const int sliced_chunk = C::kXRows == 1 ? lane % 16 : lane % 8 / C::kXRows * 2 + lane / 8 % 2;
    const uint32_t my_slices = (sliced_row * C::kXChunks + (sliced_chunk ^ swizzle_bits(sliced_row))) * 16;
    wait_for_x<C>();
    ring.begin();

    auto state = PipelineState<C::kStages>::consumer(consumer);
    for (int iteration = consumer; iteration < tile.iterations(); iteration += C::kConsumers) {
      pipeline.consumer_wait(state);
      const int k_tiles = tile.k_tiles(iteration);
      uint32_t x_begin = 0;
#pragma unroll C::kUnroll
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        const uint32_t offset = state.stage_idx * C::kWeightStageBytes + k_tile * C::kWeightTileBytes;
        // Load the operands of the weight first, because the weight arrives before x.
        Vector<uint32_t, 4> words[2][C::kN16Tiles];
        const auto load_codes = [&](int k64) {
#pragma unroll
          for (int i = 0; i < C::kN16Tiles; ++i) {
            ptx::ld_shared(words[k64][i].values, my_codes + offset + (k64 * C::kN16Tiles + i) * 512);
          }
        };
        Group<C> groups[C::kGroups][C::kN16Tiles];
        const auto load_groups = [&](int part) {
#pragma unroll
          for (int g = part * C::kPartGroups; g < (part + 1) * C::kPartGroups; ++g) {
#pragma unroll
            for (int i = 0; i < C::kN16Tiles; ++i) {
              const uint32_t half = offset + i * C::kHalfGroupBytes;
              groups[g][i] = Group<C>::load_shared(my_scales + half, my_zeros + half, g);
            }
          }
        };
        load_codes(0);
        if (C::kGroups == 1) load_codes(1);
        load_groups(0);
        if (k_tile == 0) x_begin = ring.next();

#pragma unroll
        for (int part = 0; part < C::kParts; ++part) {
          if (part + 1 < C::kParts) load_groups(part + 1);
          if (C::kParts > 1 && part + 1 == C::kParts / 2) load_codes(1);
          float group_sums[C::kPartGroups][C::kN16Tiles][C::kM8Tiles][4] = {};
          float x_sums[C::kPartGroups][C::kM8Tiles][4] = {};
          if constexpr (C::kSliced) {
#pragma unroll
            for (int row = 0; row < C::kXRows; ++row) {
              uint32_t b[2];
              ptx::ldmatrix_x2(b, x_begin + my_slices + (k_tile * 16 + row * 8) * 16);
              mma<T>(x_sums[0][0], kOnes, b[0], b[1]);
            }
          }
#pragma unroll
          for (int k32 = part * 4 / C::kParts; k32 < (part + 1) * 4 / C::kParts; ++k32) {
            uint32_t a[2][C::kN16Tiles][4];
#pragma unroll
            for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
              for (int i = 0; i < C::kN16Tiles; ++i) {
                RawCodes<T>::convert(a[k16][i], words[k32 / 2][i].values[k32 % 2 * 2 + k16]);
              }
            }
#pragma unroll
            for (int j = 0; j < C::kM8Tiles; ++j) {
              // Load four 8 x 8 matrices, for two steps of 16 along k. Lanes past the last row of x load that row
              // again; the resulting columns of y^T are not stored.
              const uint32_t within = (k_tile * 16 + k32 / 2 * 8 + j * 8 * C::kXChunks) * 16;
              uint32_t b[4];
              ptx::ldmatrix_x4(b, x_begin + (k32 % 2 == 0 ? my_x : my_other_x) + within);
#pragma unroll
              for (int k16 = 0; k16 < 2; ++k16) {
                const int g = k16 * C::kPartGroups / 2;
                if constexpr (!C::kSliced) mma<T>(x_sums[g][j], kOnes, b[k16 * 2], b[k16 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < C::kN16Tiles; ++i) {
                  mma<T>(group_sums[g][i][j], a[k16][i], b[k16 * 2], b[k16 * 2 + 1]);
                }
              }
            }
          }
          if constexpr (C::kRows == 1) {
            x_sums[0][0][0] += x_sums[0][0][1];
            x_sums[0][0][2] += x_sums[0][0][3];
          }
#pragma unroll
          for (int g = 0; g < C::kPartGroups; ++g) {
#pragma unroll
            for (int i = 0; i < C::kN16Tiles; ++i) {
              const Group<C>& group = groups[part * C::kPartGroups + g][i];
#pragma unroll
              for (int v = 0; v < 4; ++v) {
                if (v % 2 >= C::kRows) continue;
                const float scale = group.scale(v / 2);
                const float zero = -(group.zero(v / 2) + RawCodes<T>::kOffset);
#pragma unroll
                for (int j = 0; j < C::kM8Tiles; ++j) {
                  float sum = group_sums[g][i][j][v];
                  if constexpr (C::kSliced) {
                    zero_sums[i][v] = fmaf(zero * scale, x_sums[g][j][v], zero_sums[i][v]);
                  } else {
                    sum = fmaf(zero, x_sums[g][j][v], sum);
                  }
                  accumulators[i][j][v] = fmaf(sum, scale, accumulators[i][j][v]);
                }
              }
            }
          }
        }
      }
      pipeline.consumer_release(state.stage_idx, lane);
      state.advance_by(C::kConsumers);
    }
    ring.end();
#pragma unroll
    for (int i = 0; i < C::kN16Tiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        if constexpr (C::kSliced) {
          if (v % 2 >= C::kRows) continue;
          zero_sums[i][v] += __shfl_xor_sync(kFullWarp, zero_sums[i][v], 1);
          zero_sums[i][v] += __shfl_xor_sync(kFullWarp, zero_sums[i][v], 2);
          accumulators[i][0][v] += zero_sums[i][v];
        }
#pragma unroll
        for (int j = 0; j < C::kM8Tiles; ++j) accumulators[i][j][v] *= RawCodes<T>::kUnits[v / 2];
      }
    }
  };
  auto store_all = [&](float* shared_accumulators) {
#pragma unroll
    for (int i = 0; i < C::kN16Tiles; ++i) {
#pragma unroll
      for (int j = 0; j < C::kM8Tiles; ++j) {
        store_accumulators<C>(shared_accumulators, consumer, j * 8, warp % C::kConsumerWarps * kWeightTileN + i * 16,
                              accumulators[i][j]);
      }
    }
  };
  run_tile<C, C::kLoadsStreamEarly>(args, prefetch, accumulate, store_all);
}

using Kernel = GemmSm90Mma<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_sm90_mma(const uint8_t* weight, const BIAS* bias, const X* residual, X* y,
                  FUSION_PARAMETERS NEXT_WEIGHT_PARAMETER const X* x, ORDER_PARAMETER int m, int n, int k, int ldr,
                  int ldy, int ldx, float low, float high, float eps NEXT_WEIGHT_SCALARS) {
  const ResidualStream<Kernel::kOrdersY> stream{FUSION_ARGUMENTS, eps};
  const NextWeight next{NEXT_WEIGHT_ARGUMENTS};
  const GemmArguments<Kernel> args{weight, bias, residual, y, nullptr, m, n, k, ldr, ldy, low, high, stream, next};
  gemm_sm90_mma_tile(args, x, ldx, ORDER_ARGUMENT);
}
