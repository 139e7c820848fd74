/* What the fuzz targets share: numbers and views made of the fuzzer's bytes, of which there are
 * always more (zeros), and the end of the process where a promise of the core is broken. */
#ifndef FDP_FUZZ_H
#define FDP_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "../../csrc/view.h"

/* Each target has one: libFuzzer's own main calls it, or that of replay.c. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes);

typedef struct fuzz_bytes {
  const uint8_t *at;
  size_t left;
} fuzz_bytes;

uint8_t fuzz_byte(fuzz_bytes *bytes);
/* From 0 to bound - 1. */
int32_t fuzz_below(fuzz_bytes *bytes, int32_t bound);
/* Mostly small, sometimes an extreme, sometimes any. */
int64_t fuzz_number(fuzz_bytes *bytes);
/* Usually one that exists. */
fdp_dtype fuzz_dtype(fuzz_bytes *bytes);

/* Any view: sizes, strides and address make no sense most of the time. */
fdp_view fuzz_wild_view(fuzz_bytes *bytes);
/* A view of 1-byte to 16-byte elements whose elements all lie in the arena, or an empty one. At
 * most 7 dimensions and `most` elements. */
fdp_view fuzz_tame_view(fuzz_bytes *bytes, fdp_dtype dtype, const int64_t *shape, int32_t ndim,
                        char *arena, int64_t arena_bytes);
/* At most 7 sizes, the product at most `most`. Returns their number. */
int32_t fuzz_shape(fuzz_bytes *bytes, int64_t most, int64_t *shape);

/* The offset in bytes of the element of that number, counted in row-major order. */
int64_t fuzz_offset_of(const fdp_view *view, int64_t number);

void fuzz_broken(const char *file, int line, const char *text);
#define FUZZ_CHECK(condition) \
  do {                        \
    if (!(condition)) fuzz_broken(__FILE__, __LINE__, #condition); \
  } while (0)

#endif
