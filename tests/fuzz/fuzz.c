#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint8_t fuzz_byte(fuzz_bytes *bytes) {
  if (bytes->left == 0) return 0;
  bytes->left -= 1;
  return *bytes->at++;
}

int32_t fuzz_below(fuzz_bytes *bytes, int32_t bound) { return fuzz_byte(bytes) % bound; }

int64_t fuzz_number(fuzz_bytes *bytes) {
  static const int64_t extremes[] = {INT64_MAX, INT64_MIN,      INT64_MAX - 1, INT64_MIN + 1,
                                     INT32_MAX, INT32_MIN,      INT64_C(1) << 32, -1,
                                     INT64_C(1) << 61, -(INT64_C(1) << 61), INT64_C(1) << 47, 0};
  uint8_t kind = fuzz_byte(bytes);
  if (kind < 200) return kind % 20 - 4;
  if (kind < 230) return extremes[kind % (sizeof extremes / sizeof *extremes)];
  uint64_t number = 0;
  for (int i = 0; i < 8; ++i) number = number << 8 | fuzz_byte(bytes);
  return (int64_t)number;
}

fdp_dtype fuzz_dtype(fuzz_bytes *bytes) {
  static const fdp_dtype known[] = {{0, 8, 1},  {0, 64, 1}, {1, 8, 1},   {2, 16, 1},
                                    {2, 32, 1}, {2, 64, 1}, {4, 16, 1},  {5, 64, 1},
                                    {5, 128, 1}, {6, 8, 1}, {0, 32, 1},  {2, 32, 4}};
  uint8_t kind = fuzz_byte(bytes);
  if (kind < 240) return known[kind % (sizeof known / sizeof *known)];
  fdp_dtype dtype;
  dtype.code = fuzz_byte(bytes);
  dtype.bits = fuzz_byte(bytes);
  dtype.lanes = (uint16_t)(fuzz_byte(bytes) << 8 | fuzz_byte(bytes));
  return dtype;
}

fdp_view fuzz_wild_view(fuzz_bytes *bytes) {
  fdp_view view = {.device = {FDP_DEVICE_HOST + fuzz_below(bytes, 4), fuzz_below(bytes, 3)}};
  view.dtype = fuzz_dtype(bytes);
  uint8_t kind = fuzz_byte(bytes);
  view.ndim = kind < 230 ? kind % 6 : kind < 240 ? FDP_MAX_DIMS : (int32_t)fuzz_number(bytes);
  view.data = (void *)(uintptr_t)fuzz_number(bytes);
  if (fuzz_byte(bytes) < 200) view.data = (void *)((uintptr_t)1 << 40);
  for (int32_t d = 0; d < view.ndim && d < FDP_MAX_DIMS; ++d) {
    view.shape[d] = fuzz_number(bytes);
    view.strides[d] = fuzz_number(bytes);
  }
  return view;
}

int32_t fuzz_shape(fuzz_bytes *bytes, int64_t most, int64_t *shape) {
  int32_t ndim = fuzz_below(bytes, 8);
  int64_t count = 1;
  for (int32_t d = 0; d < ndim; ++d) {
    shape[d] = fuzz_below(bytes, 7);
    if (count * shape[d] > most) shape[d] = 1;
    if (shape[d] > 0) count *= shape[d];
  }
  return ndim;
}

fdp_view fuzz_tame_view(fuzz_bytes *bytes, fdp_dtype dtype, const int64_t *shape, int32_t ndim,
                        char *arena, int64_t arena_bytes) {
  fdp_view view = {.device = {FDP_DEVICE_HOST, 0}, .dtype = dtype, .ndim = ndim};
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(dtype);
  int64_t room = arena_bytes / item_bytes; /* elements from `low` to `high` fit in */
  int64_t low = 0;
  int64_t high = 0;
  int32_t order[8] = {0};
  /* As a contiguous array whose dimensions were permuted, padded and turned round; or anything. */
  for (int32_t d = 0; d < ndim; ++d) {
    int32_t at = fuzz_below(bytes, d + 1);
    for (int32_t k = d; k > at; --k) order[k] = order[k - 1];
    order[at] = d;
  }
  bool is_wild = fuzz_byte(bytes) < 40;
  int64_t stride = 1;
  for (int32_t k = 0; k < ndim; ++k) {
    int32_t d = order[k];
    uint8_t how = fuzz_byte(bytes);
    view.shape[d] = shape[d];
    int64_t chosen = is_wild ? how % 9 - 4 : how % 4 == 0 ? stride + how / 64 : stride;
    if (!is_wild && how % 8 == 7) chosen = -chosen;
    int64_t reach = shape[d] > 1 ? (shape[d] - 1) * chosen : 0;
    int64_t span = high - low + (reach < 0 ? -reach : reach);
    if (span >= room) {
      chosen = 0;
      reach = 0;
    }
    view.strides[d] = chosen;
    if (reach < 0) low += reach;
    if (reach > 0) high += reach;
    stride = high - low + 1;
  }
  int64_t spare = room - (high - low) - 1;
  int64_t start = spare > 0 ? fuzz_byte(bytes) % (spare < 16 ? spare : 16) : 0;
  view.data = arena + (start - low) * item_bytes;
  return view;
}

int64_t fuzz_offset_of(const fdp_view *view, int64_t number) {
  int64_t offset = 0;
  for (int32_t d = view->ndim - 1; d >= 0; --d) {
    offset += number % view->shape[d] * view->strides[d];
    number /= view->shape[d];
  }
  return offset * (int64_t)fdp_dtype_bytes(view->dtype);
}

void fuzz_broken(const char *file, int line, const char *text) {
  fprintf(stderr, "%s:%d: not true: %s\n", file, line, text);
  abort();
}
