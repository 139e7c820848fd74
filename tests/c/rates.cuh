/* Rates of the CUDA kernels, each beside a plain copy of the same size on the same GPU: packing the
 * parameters of a ResNet, and sums. Part of test_cuda.cu, which says how to build it; no header but
 * for its name, and so as long as the code that it is. */
#ifndef FDP_TEST_RATES_CUH
#define FDP_TEST_RATES_CUH

#include <assert.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "cases.h"

static cudaStream_t stream;

static void need(cudaError_t code, const char *what) {
  if (code == cudaSuccess) return;
  printf("FAILED %s: %s\n", what, cudaGetErrorString(code));
  exit(1);
}

typedef struct measure_case {
  const char *name;
  int kind; /* 0 plain copy, 1 pack, 2 unpack, 3 sum */
  char *memory;
  int64_t size_bytes;
  fdp_segment *segments;
  int segment_count;
  fdp_dtype dtype;
  int source_count;
} measure_case;

static int run_once(const measure_case *c) {
  const void *sources[FDP_MAX_REPLICAS];
  for (int i = 0; i < c->source_count; i++) sources[i] = c->memory + (i + 1) * c->size_bytes;
  int64_t count_elems = c->size_bytes * 8 / c->dtype.bits;
  fdp_sum sum = {c->memory, sources, c->source_count, count_elems, c->dtype, false};
  switch (c->kind) {
    case 1: return fdp_cuda_pack(c->memory, c->segments, c->segment_count, stream);
    case 2: return fdp_cuda_unpack(c->memory, c->segments, c->segment_count, stream);
    case 3: return fdp_cuda_sum(&sum, 1, stream);
    default:
      return cudaMemcpyAsync(c->memory, c->memory + c->size_bytes, c->size_bytes,
                             cudaMemcpyDeviceToDevice, stream);
  }
}

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

/* Median GB/s, read and written, of REPEATS calls in a row. */
static double rate_of(const measure_case *c) {
  enum { ROUNDS = 11, REPEATS = 10 };
  float times_ms[ROUNDS];
  cudaEvent_t begin, end;
  need(cudaEventCreate(&begin), "event");
  need(cudaEventCreate(&end), "event");
  need((cudaError_t)run_once(c), c->name);
  for (int round = 0; round < ROUNDS; round++) {
    need(cudaEventRecord(begin, stream), "record");
    for (int k = 0; k < REPEATS; k++) need((cudaError_t)run_once(c), c->name);
    need(cudaEventRecord(end, stream), "record");
    need(cudaStreamSynchronize(stream), c->name);
    need(cudaEventElapsedTime(&times_ms[round], begin, end), "time");
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  qsort(times_ms, ROUNDS, sizeof times_ms[0], by_value);
  double moved_bytes = (double)c->size_bytes * (c->kind == 3 ? c->source_count + 1 : 2);
  return moved_bytes * REPEATS / (times_ms[ROUNDS / 2] * 1e6);
}

static void report(const measure_case *c) {
  measure_case plain = *c;
  plain.kind = 0;
  double floor_rate = rate_of(&plain), rate = rate_of(c);
  int moved = c->kind == 3 ? c->source_count + 1 : 2;
  printf("%-22s %2d x %7.2f MB  %8.1f GB/s  %8.1f us   plain copy %8.1f GB/s  share %.2f\n",
         c->name, moved, c->size_bytes / 1e6, rate, moved * c->size_bytes / rate / 1e3, floor_rate,
         rate / floor_rate);
}

/* The 161 parameters of a ResNet-50, a quarter of their bytes: 25 MB. */
static int resnet_sizes(int64_t *sizes) {
  static const int widths[] = {64, 128, 256, 512}, depths[] = {3, 4, 6, 3};
  int count = 0, input = 64;
  sizes[count++] = 64 * 3 * 7 * 7;
  sizes[count++] = 64, sizes[count++] = 64;
  for (int stage = 0; stage < 4; stage++) {
    int width = widths[stage];
    for (int block = 0; block < depths[stage]; block++) {
      int convolutions[] = {input * width, 9 * width * width, 4 * width * width,
                            4 * width * input};
      for (int k = 0; k < (block == 0 ? 4 : 3); k++) {
        sizes[count++] = convolutions[k];
        sizes[count++] = k < 2 ? width : 4 * width, sizes[count++] = k < 2 ? width : 4 * width;
      }
      input = 4 * width;
    }
  }
  sizes[count++] = 1000 * 2048;
  sizes[count++] = 1000;
  return count;
}

static void measure_rates(void) {
  enum { PARAMETERS = 161 };
  int64_t sizes[PARAMETERS], flat_bytes = 0, sum_bytes = 256 << 20;
  fdp_segment segments[PARAMETERS];
  char *memory;
  int count = resnet_sizes(sizes);
  assert(count == PARAMETERS);
  need(cudaMalloc((void **)&memory, 9 * sum_bytes), "memory");
  need(cudaMemset(memory, 0, 9 * sum_bytes), "memory");
  for (int i = 0; i < count; i++) {
    segments[i].offset_bytes = flat_bytes;
    segments[i].size_bytes = sizes[i];
    flat_bytes += (sizes[i] + 63) / 64 * 64;
  }
  for (int i = 0; i < count; i++) {
    segments[i].tensor = memory + 2 * flat_bytes + 512 * i + segments[i].offset_bytes;
  }
  measure_case pack = {"pack 161 tensors", 1, memory, flat_bytes, segments, count,
                       {FDP_CODE_FLOAT, 32, 1}, 0};
  report(&pack);
  pack.name = "unpack 161 tensors";
  pack.kind = 2;
  report(&pack);
  static const int kinds[] = {1, 3, 2, 8}; /* float32, bfloat16, float16, int32 */
  static const int source_counts[] = {2, 4, 8};
  for (int k = 0; k < 4; k++) {
    const case_dtype *type = &case_dtypes[kinds[k]];
    for (int n = 0; n < 3; n++) {
      for (int64_t size = 25 << 20; size <= sum_bytes; size += sum_bytes - (25 << 20)) {
        measure_case c = {type->name, 3, memory, size, NULL, 0, type->dtype, source_counts[n]};
        report(&c);
      }
    }
  }
  cudaFree(memory);
}

#endif
