/* The inside of a bucket, for the files that implement bucket.h. Written by fdp_bucket_open
 * only. */
#ifndef FDP_BUCKET_SLOTS_H
#define FDP_BUCKET_SLOTS_H

#include "bucket.h"

typedef struct bucket_slot {
  int64_t offset_bytes;
  int64_t size_bytes;
  int64_t count_elems;
  int32_t ndim;
  const int64_t *shape; /* ndim entries of the bucket's own */
  const int64_t *strides;
} bucket_slot;

struct fdp_bucket {
  int32_t number; /* of the process's buckets, from 1 */
  fdp_dtype dtype;
  int32_t count;
  int64_t size_bytes;
  bucket_slot *slots;
  int64_t *dims; /* shapes and strides of all slots */
  const char *transport; /* by name, as in context.h; NULL: FASTDP_TRANSPORT's */
};

static inline bool fdp_bucket_slot_has_shape(const bucket_slot *slot, const fdp_view *view) {
  if (slot->ndim != view->ndim) return false;
  for (int32_t d = 0; d < slot->ndim; ++d) {
    if (slot->shape[d] != view->shape[d]) return false;
  }
  return true;
}

/* Both have the slot's shape: true if the view's bytes are the slot's, in order. */
static inline bool fdp_bucket_slot_has_layout(const bucket_slot *slot, const fdp_view *view) {
  for (int32_t d = 0; d < slot->ndim; ++d) {
    if (slot->shape[d] > 1 && slot->strides[d] != view->strides[d]) return false;
  }
  return true;
}

/* fdp_view_extent of a view that has the slot's shape: at once in the usual case. */
static inline void fdp_bucket_slot_extent(const bucket_slot *slot, const fdp_view *view,
                                          const char **begin, const char **end) {
  if (!fdp_bucket_slot_has_layout(slot, view)) {
    fdp_view_extent(view, begin, end);
    return;
  }
  *begin = view->data;
  *end = *begin + slot->size_bytes;
}

/* `name` and the indices go into the message. `second` < 0: one index only. */
fdp_status fdp_bucket_check_tensor(const fdp_bucket *bucket, int32_t index, const fdp_view *view,
                                   const char *verb, const char *name, int32_t first,
                                   int32_t second);
/* `index` < 0: the argument is no array. */
fdp_status fdp_bucket_check_flat(const fdp_bucket *bucket, const fdp_view *flat, const char *verb,
                                 const char *name, int32_t index);

#endif
