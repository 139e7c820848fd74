/* What the CUDA kernels share: how a launch is cut into tiles, the 16-byte access, and the launch.
 *
 * A launch is given a table of entries (tensors, sums, copies) by value, in its parameters: nothing
 * to allocate, to copy or to keep alive. An entry is cut into tiles of one size, a block does one
 * tile, and first_tiles[] says at which tile each entry starts; so blocks are balanced by bytes
 * whatever the sizes are. Parameters are limited to 4 KB before CUDA 12.1 and on older drivers:
 * a longer table becomes several launches. Owns nothing; launchers may be called by any thread. */
#ifndef FDP_TILE_CUH
#define FDP_TILE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#define FDP_TILE_THREADS 256
/* Four 16-byte words for each thread, all in flight at once. */
#define FDP_TILE_WORDS 4
#define FDP_TILE_BYTES (16 * FDP_TILE_WORDS * FDP_TILE_THREADS)
#define FDP_PARAMETER_BYTES 4096
/* Tiles of one launch: far below what a grid may have, and no 32-bit index overflows. */
#define FDP_MAX_TILES (1 << 30)

/* The largest power of two, at most 16, that divides all that was put into `bits` with "or". */
static inline __host__ __device__ uint32_t fdp_word_bytes(uint64_t bits) {
  uint32_t low = (uint32_t)bits | 16u;
  return low & (~low + 1u);
}

/* The entry that the block's tile belongs to: the last whose first tile is not beyond it. Every
 * thread of a block finds the same one, so the reads of the table are uniform. */
static inline __device__ int32_t fdp_entry_of_tile(const uint32_t *first_tiles,
                                                   int32_t entry_count, uint32_t tile) {
  int32_t low = 0, high = entry_count;
  while (high - low > 1) {
    int32_t middle = (low + high) / 2;
    if (first_tiles[middle] <= tile) low = middle; else high = middle;
  }
  return low;
}

/* By the function and not by <<<>>>: its result is this launch's own, where cudaGetLastError may
 * report what somebody else left there. On failure the error is taken off again, so that nobody
 * else finds ours. */
template <typename Table>
static inline int fdp_launch(void (*kernel)(Table), const Table &table, uint32_t block_count,
                             void *stream) {
  void *arguments[] = {const_cast<Table *>(&table)};
  cudaError_t error =
      cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(block_count),
                       dim3(FDP_TILE_THREADS), arguments, 0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) (void)cudaGetLastError();
  return static_cast<int>(error);
}

#endif
