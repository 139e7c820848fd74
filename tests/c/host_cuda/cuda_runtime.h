/* What the CUDA kernels and their test ask of a GPU, on the host: a kernel is a function, and each
 * of its threads a turn of a loop, which is all that it takes, since no two threads of ours meet.
 * So their arithmetic is tested without a GPU, and under sanitizers. Memory is the host's, streams
 * are nothing, all work is done when a call returns. One thread. */
#ifndef FDP_HOST_CUDA_RUNTIME_H
#define FDP_HOST_CUDA_RUNTIME_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x;
  dim3(unsigned size = 1) : x(size) {}
};
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };

static dim3 threadIdx, blockIdx, gridDim;

/* ---- arithmetic ---- */

static inline float2 make_float2(float x, float y) { return float2{x, y}; }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return (uint32_t)((uint64_t)a * b >> 32);
}
static inline int __clz(uint32_t a) { return a ? __builtin_clz(a) : 32; }

static inline float __uint_as_float(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

static inline uint32_t __float_as_uint(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

static inline uint32_t __vadd2(uint32_t a, uint32_t b) {
  return ((a + b) & 0xffff) | ((a >> 16) + (b >> 16)) << 16;
}

static inline uint32_t __vadd4(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int i = 0; i < 32; i += 8) sum |= (((a >> i) + (b >> i)) & 0xff) << i;
  return sum;
}

static inline uint32_t __vcmpne4(uint32_t a, uint32_t b) {
  uint32_t mask = 0;
  for (int i = 0; i < 32; i += 8) mask |= (((a ^ b) >> i & 0xff) ? UINT32_C(0xff) : 0) << i;
  return mask;
}

/* ---- the runtime ---- */

typedef int cudaError_t;
typedef void *cudaStream_t;
typedef void *cudaEvent_t;
enum { cudaSuccess, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1 };

static inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned) {
  return cudaSuccess;
}
static inline cudaError_t cudaMalloc(void **address, size_t size) {
  *address = aligned_alloc(256, (size + 255) / 256 * 256);
  return *address ? cudaSuccess : 2;
}
static inline cudaError_t cudaMallocHost(void **address, size_t size) {
  return cudaMalloc(address, size);
}
static inline cudaError_t cudaFree(void *address) {
  free(address);
  return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int,
                                          cudaStream_t) {
  memcpy(to, from, size);
  return cudaSuccess;
}
static inline cudaError_t cudaMemset(void *address, int value, size_t size) {
  memset(address, value, size);
  return cudaSuccess;
}
/* There is no cudaMemsetAsync: what a kernel of ours writes may be another GPU's memory, which is
 * checked for kernels and copies alone (csrc/peer_check.h). */
/* Nothing is timed here. */
static inline cudaError_t cudaEventCreate(cudaEvent_t *) { return cudaSuccess; }
static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}

/* In place of cudaLaunchKernel, by the Makefile, since that is not told what the argument is. */
template <typename Table>
cudaError_t host_launch(void (*kernel)(Table), dim3 grid, dim3 block, void **arguments, size_t,
                        cudaStream_t) {
  const Table &table = *static_cast<const Table *>(arguments[0]);
  gridDim = grid;
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel(table);
  }
  return cudaSuccess;
}

#endif
