/* Moving bytes in plain C: strided copies, and packing tensors into a flat buffer and back. The
 * engine of the CPU backend and the oracle of copy.cu and pack.cu; sums are in ref_sum.c. It owns
 * nothing, any thread may call, and all work is done before a call returns. */
#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "kernels.h"

/* One row of a strided copy, strides in bytes. `size_bytes` is a constant at each place of use, so
 * memcpy becomes one load and one store that need no alignment. */
static inline __attribute__((always_inline)) void copy_row_of(
    char *target, const char *source, int64_t count, int64_t target_stride, int64_t source_stride,
    size_t size_bytes) {
  for (int64_t k = 0; k < count; k++) {
    memcpy(target + k * target_stride, source + k * source_stride, size_bytes);
  }
}

static void copy_row(char *target, const char *source, int64_t count, int64_t target_stride,
                     int64_t source_stride, int64_t item_bytes) {
  if (target_stride == item_bytes && source_stride == item_bytes) {
    memcpy(target, source, (size_t)(count * item_bytes));
    return;
  }
  switch (item_bytes) {
    case 1: copy_row_of(target, source, count, target_stride, source_stride, 1); break;
    case 2: copy_row_of(target, source, count, target_stride, source_stride, 2); break;
    case 4: copy_row_of(target, source, count, target_stride, source_stride, 4); break;
    case 8: copy_row_of(target, source, count, target_stride, source_stride, 8); break;
    case 16: copy_row_of(target, source, count, target_stride, source_stride, 16); break;
    default:
      copy_row_of(target, source, count, target_stride, source_stride, (size_t)item_bytes);
  }
}

static void copy_one(const fdp_strided_copy *copy) {
  assert(copy->ndim >= 0 && copy->ndim <= FDP_COPY_MAX_DIMS);
  assert(copy->item_bytes > 0);
  if (copy->ndim == 0) {
    memcpy(copy->target, copy->source, (size_t)copy->item_bytes);
    return;
  }
  for (int32_t d = 0; d < copy->ndim; d++) {
    assert(copy->shape[d] >= 0);
    if (copy->shape[d] == 0) return;
  }
  /* An odometer over all dimensions but the last. The two pointers follow it, so that no index is
   * multiplied out again; each digit that wraps takes back what it had added. */
  int32_t last = copy->ndim - 1;
  int64_t index[FDP_COPY_MAX_DIMS] = {0};
  char *target = copy->target;
  const char *source = copy->source;
  for (;;) {
    copy_row(target, source, copy->shape[last], copy->target_strides_bytes[last],
             copy->source_strides_bytes[last], copy->item_bytes);
    int32_t d = last - 1;
    for (; d >= 0; d--) {
      if (++index[d] < copy->shape[d]) {
        target += copy->target_strides_bytes[d];
        source += copy->source_strides_bytes[d];
        break;
      }
      target -= (copy->shape[d] - 1) * copy->target_strides_bytes[d];
      source -= (copy->shape[d] - 1) * copy->source_strides_bytes[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

int fdp_ref_copy_strided(const fdp_strided_copy *copies, int32_t copy_count, void *stream) {
  (void)stream;
  assert(copy_count >= 0);
  for (int32_t i = 0; i < copy_count; i++) copy_one(&copies[i]);
  return 0;
}

int fdp_ref_pack(void *flat, const fdp_segment *segments, int32_t segment_count, void *stream) {
  (void)stream;
  assert(segment_count >= 0);
  for (int32_t i = 0; i < segment_count; i++) {
    const fdp_segment *segment = &segments[i];
    assert(segment->offset_bytes >= 0 && segment->size_bytes >= 0);
    char *slot = (char *)flat + segment->offset_bytes;
    if (segment->size_bytes == 0) continue;
    if (segment->tensor == NULL) {
      memset(slot, 0, (size_t)segment->size_bytes);
    } else if (segment->tensor != slot) { /* a gradient may already lie in its slot */
      memcpy(slot, segment->tensor, (size_t)segment->size_bytes);
    }
  }
  return 0;
}

int fdp_ref_unpack(const void *flat, const fdp_segment *segments, int32_t segment_count,
                   void *stream) {
  (void)stream;
  assert(segment_count >= 0);
  for (int32_t i = 0; i < segment_count; i++) {
    const fdp_segment *segment = &segments[i];
    assert(segment->offset_bytes >= 0 && segment->size_bytes >= 0);
    const char *slot = (const char *)flat + segment->offset_bytes;
    if (segment->size_bytes == 0 || segment->tensor == NULL || segment->tensor == slot) continue;
    memcpy(segment->tensor, slot, (size_t)segment->size_bytes);
  }
  return 0;
}
