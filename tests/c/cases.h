/* Cases shared by tests of the core and by those of the kernels in C and in CUDA: a seeded
 * generator, chunks, the dtypes that can be summed, and strided copies of any shape. A case owns no
 * memory; it says how many bytes it wants. Same seed, same cases. */
#ifndef FDP_TEST_CASES_H
#define FDP_TEST_CASES_H

#include <stdint.h>
#include <string.h>

#include "../../kernels/kernels.h"

static uint64_t case_state = 1;

static inline uint64_t case_bits(void) { /* splitmix64 */
  uint64_t z = (case_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* In [0, bound). */
static inline int64_t case_below(int64_t bound) {
  return (int64_t)(case_bits() % (uint64_t)bound);
}

static inline void case_fill(void *bytes, int64_t size_bytes) {
  char *at = (char *)bytes;
  for (; size_bytes > 0; at += 8, size_bytes -= 8) {
    uint64_t bits = case_bits();
    memcpy(at, &bits, size_bytes < 8 ? (size_t)size_bytes : 8);
  }
}

/* The sizes of the chunks, at most `most`, that torch.chunk makes of `length`; gives how many. */
static inline int32_t case_chunks(int64_t length, int32_t most, int64_t *sizes) {
  int64_t size = (length + most - 1) / most, left = length;
  int32_t count = 0;
  do {
    sizes[count] = left < size ? left : size;
    left -= sizes[count++];
  } while (left > 0);
  return count;
}

typedef struct case_dtype {
  const char *name;
  fdp_dtype dtype;
  int64_t elem_bytes;
} case_dtype;

static const case_dtype case_dtypes[] = {
    {"float64", {FDP_CODE_FLOAT, 64, 1}, 8},      {"float32", {FDP_CODE_FLOAT, 32, 1}, 4},
    {"float16", {FDP_CODE_FLOAT, 16, 1}, 2},      {"bfloat16", {FDP_CODE_BFLOAT, 16, 1}, 2},
    {"complex128", {FDP_CODE_COMPLEX, 128, 1}, 16}, {"complex64", {FDP_CODE_COMPLEX, 64, 1}, 8},
    {"complex32", {FDP_CODE_COMPLEX, 32, 1}, 4},  {"int64", {FDP_CODE_INT, 64, 1}, 8},
    {"int32", {FDP_CODE_INT, 32, 1}, 4},          {"int16", {FDP_CODE_INT, 16, 1}, 2},
    {"int8", {FDP_CODE_INT, 8, 1}, 1},            {"uint64", {FDP_CODE_UINT, 64, 1}, 8},
    {"uint32", {FDP_CODE_UINT, 32, 1}, 4},        {"uint16", {FDP_CODE_UINT, 16, 1}, 2},
    {"uint8", {FDP_CODE_UINT, 8, 1}, 1},          {"bool", {FDP_CODE_BOOL, 8, 1}, 1}};

enum { CASE_DTYPES = sizeof case_dtypes / sizeof case_dtypes[0] };

/* True if two elements are the same bits, or both NaN (which NaN is the machine's choice). */
static inline int case_same_float(uint64_t a, uint64_t b, int exponent_bits, int mantissa_bits) {
  uint64_t magnitude = ~(~(uint64_t)0 << (exponent_bits + mantissa_bits));
  uint64_t infinity = magnitude & (~(uint64_t)0 << mantissa_bits);
  return a == b || ((a & magnitude) > infinity && (b & magnitude) > infinity);
}

/* The first element where two arrays of a dtype differ, or -1. */
static inline int64_t case_difference(const case_dtype *type, const void *a, const void *b,
                                      int64_t count_elems) {
  int code = type->dtype.code, parts = code == FDP_CODE_COMPLEX ? 2 : 1;
  int64_t part_bytes = type->elem_bytes / parts;
  if (memcmp(a, b, (size_t)(count_elems * type->elem_bytes)) == 0) return -1;
  for (int64_t k = 0; k < count_elems * parts; k++) {
    uint64_t x = 0, y = 0;
    memcpy(&x, (const char *)a + k * part_bytes, (size_t)part_bytes);
    memcpy(&y, (const char *)b + k * part_bytes, (size_t)part_bytes);
    int same = x == y;
    if (code == FDP_CODE_BFLOAT) same = case_same_float(x, y, 8, 7);
    if (code == FDP_CODE_FLOAT || code == FDP_CODE_COMPLEX) {
      same = part_bytes == 8   ? case_same_float(x, y, 11, 52)
             : part_bytes == 4 ? case_same_float(x, y, 8, 23)
                               : case_same_float(x, y, 5, 10);
    }
    if (!same) return k / parts;
  }
  return -1;
}

/* Lays `copy`'s dimensions out in a random order with random gaps and signs; returns the bytes that
 * this takes and in `origin_bytes` where the first item starts in them. */
static inline int64_t case_strides(const fdp_strided_copy *copy, int may_be_zero,
                                   int64_t *strides_bytes, int64_t *origin_bytes) {
  int32_t order[FDP_COPY_MAX_DIMS];
  for (int32_t d = 0; d < copy->ndim; d++) order[d] = d;
  for (int32_t d = copy->ndim - 1; d > 0 && case_below(2); d--) {
    int32_t other = (int32_t)case_below(d + 1), kept = order[d];
    order[d] = order[other];
    order[other] = kept;
  }
  int64_t span = copy->item_bytes;
  *origin_bytes = 0;
  for (int32_t d = copy->ndim - 1; d >= 0; d--) {
    int64_t stride = span + (case_below(4) == 0 ? case_below(9) : 0);
    int64_t length = copy->shape[order[d]] > 0 ? copy->shape[order[d]] : 1;
    if (may_be_zero && case_below(5) == 0) {
      strides_bytes[order[d]] = 0;
      continue;
    }
    int negative = case_below(5) == 0;
    strides_bytes[order[d]] = negative ? -stride : stride;
    if (negative) *origin_bytes += (length - 1) * stride;
    span += (length - 1) * stride;
  }
  return span;
}

#endif
