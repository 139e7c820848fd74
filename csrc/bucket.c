#include "bucket.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bucket_slots.h"

static int64_t greatest_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* Checks sizes, not data, which need not be there. */
static fdp_status count_elems_of(const fdp_view *prototype, int32_t index, int64_t *count_elems) {
  if (prototype->ndim < 0 || prototype->ndim > FDP_MAX_DIMS) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "bucket: prototypes[%d] has %d dimensions, must have 0 "
                    "to %d", index, prototype->ndim, FDP_MAX_DIMS);
  }
  bool empty = false;
  for (int32_t d = 0; d < prototype->ndim; ++d) {
    if (prototype->shape[d] < 0) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "bucket: prototypes[%d]: size of dimension %d is %"
                      PRId64 ", must not be negative", index, d, prototype->shape[d]);
    }
    if (prototype->shape[d] == 0) empty = true;
  }
  *count_elems = empty ? 0 : 1;
  for (int32_t d = 0; d < prototype->ndim && !empty; ++d) {
    if (__builtin_mul_overflow(*count_elems, prototype->shape[d], count_elems)) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "bucket: prototypes[%d]: number of elements overflows, "
                      "must be at most %" PRId64, index, INT64_MAX);
    }
  }
  return FDP_OK;
}

/* Where a slot begins: at `wanted_elems`, or by NULL at the first aligned place behind the slots
 * before it, which end at `end_bytes`. False if that overflows. */
static bool find_start(int64_t end_bytes, int64_t item_bytes, const int64_t *wanted_elems,
                       int64_t *start_bytes) {
  if (wanted_elems) return !__builtin_mul_overflow(*wanted_elems, item_bytes, start_bytes);
  /* Offsets are whole elements too, whatever their size. */
  int64_t step =
      FDP_ALIGNMENT_BYTES / greatest_divisor(FDP_ALIGNMENT_BYTES, item_bytes) * item_bytes;
  if (__builtin_add_overflow(end_bytes, step - 1, start_bytes)) return false;
  *start_bytes = *start_bytes / step * step;
  return true;
}

/* Lays the slot behind bucket->size_bytes, and moves that on. */
static fdp_status lay_slot(fdp_bucket *bucket, int32_t index, const fdp_view *prototype,
                           const int64_t *wanted_elems, int64_t *dims) {
  bucket_slot *slot = &bucket->slots[index];
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(bucket->dtype);
  fdp_status status = count_elems_of(prototype, index, &slot->count_elems);
  if (status != FDP_OK) return status;
  int64_t end_elems = bucket->size_bytes / item_bytes;
  if (wanted_elems && *wanted_elems < end_elems) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "bucket: offsets[%d] is %" PRId64 ", must be at least %"
                    PRId64 ", where the slots before it end", index, *wanted_elems, end_elems);
  }
  if (__builtin_mul_overflow(slot->count_elems, item_bytes, &slot->size_bytes) ||
      !find_start(bucket->size_bytes, item_bytes, wanted_elems, &slot->offset_bytes) ||
      __builtin_add_overflow(slot->offset_bytes, slot->size_bytes, &bucket->size_bytes)) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "bucket: size overflows at prototypes[%d] of %" PRId64
                    " elements, must be at most %" PRId64 " bytes", index, slot->count_elems,
                    INT64_MAX);
  }
  slot->ndim = prototype->ndim;
  slot->shape = dims;
  slot->strides = dims + prototype->ndim;
  bool keeps_strides = fdp_view_is_dense(prototype);
  int64_t stride = 1;
  for (int32_t d = prototype->ndim - 1; d >= 0; --d) {
    dims[d] = prototype->shape[d];
    dims[prototype->ndim + d] = keeps_strides ? prototype->strides[d] : stride;
    if (!keeps_strides) stride *= prototype->shape[d];
  }
  return FDP_OK;
}

fdp_status fdp_bucket_open(const fdp_view *prototypes, const int64_t *offsets_elems, int32_t count,
                           fdp_bucket **bucket) {
  if (count < 1) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "bucket: number of prototypes is %d, must be at least 1",
                    count);
  }
  fdp_dtype dtype = prototypes[0].dtype;
  char text[48], first_text[48];
  if (fdp_dtype_bytes(dtype) == 0) {
    return fdp_fail(FDP_INVALID_TYPE, "bucket: elements of %s do not fill whole bytes",
                    fdp_dtype_name(dtype, text, sizeof text));
  }
  size_t dim_count = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (!fdp_dtype_equal(prototypes[i].dtype, dtype)) {
      return fdp_fail(FDP_INVALID_TYPE, "bucket: prototypes[%d] is %s, must be %s as prototypes[0]",
                      i, fdp_dtype_name(prototypes[i].dtype, text, sizeof text),
                      fdp_dtype_name(dtype, first_text, sizeof first_text));
    }
    if (prototypes[i].ndim > 0) dim_count += 2 * (size_t)prototypes[i].ndim;
  }
  fdp_bucket *opened = calloc(1, sizeof *opened);
  fdp_status status = FDP_OK;
  if (opened) {
    opened->slots = calloc((size_t)count, sizeof *opened->slots);
    opened->dims = calloc(dim_count + 1, sizeof *opened->dims);
  }
  if (!opened || !opened->slots || !opened->dims) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "bucket: no host memory for %d slots", count);
    goto done;
  }
  static atomic_int last_number; /* for records: never read back */
  opened->number = 1 + atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed);
  opened->dtype = dtype;
  opened->count = count;
  int64_t *dims = opened->dims;
  for (int32_t i = 0; i < count; ++i) {
    FDP_TRY(lay_slot(opened, i, &prototypes[i], offsets_elems ? &offsets_elems[i] : NULL, dims));
    dims += 2 * prototypes[i].ndim;
  }
  *bucket = opened;
  opened = NULL;
done:
  fdp_bucket_close(opened);
  return status;
}

void fdp_bucket_close(fdp_bucket *bucket) {
  if (!bucket) return;
  free(bucket->dims);
  free(bucket->slots);
  free(bucket);
}

fdp_status fdp_bucket_demand(fdp_bucket *bucket, const char *transport) {
  return fdp_context_transport_name(transport, &bucket->transport);
}

int32_t fdp_bucket_number(const fdp_bucket *bucket) { return bucket->number; }

int32_t fdp_bucket_count(const fdp_bucket *bucket) { return bucket->count; }

int64_t fdp_bucket_size_bytes(const fdp_bucket *bucket) { return bucket->size_bytes; }

int64_t fdp_bucket_offset_bytes(const fdp_bucket *bucket, int32_t index) {
  assert(index >= 0 && index < bucket->count);
  return bucket->slots[index].offset_bytes;
}

fdp_view fdp_bucket_slot(const fdp_bucket *bucket, int32_t index, void *flat_data,
                         fdp_device_id device) {
  assert(index >= 0 && index < bucket->count);
  const bucket_slot *slot = &bucket->slots[index];
  fdp_view view;
  /* An empty bucket may have no memory, so no address to add to. */
  view.data = flat_data ? (char *)flat_data + slot->offset_bytes : NULL;
  view.device = device;
  view.dtype = bucket->dtype;
  view.ndim = slot->ndim;
  memcpy(view.shape, slot->shape, (size_t)slot->ndim * sizeof *slot->shape);
  memcpy(view.strides, slot->strides, (size_t)slot->ndim * sizeof *slot->strides);
  return view;
}

fdp_status fdp_bucket_check_tensor(const fdp_bucket *bucket, int32_t index, const fdp_view *view,
                                   const char *verb, const char *name, int32_t first,
                                   int32_t second) {
  const bucket_slot *slot = &bucket->slots[index];
  bool has_dtype = fdp_dtype_equal(view->dtype, bucket->dtype);
  if (has_dtype && fdp_bucket_slot_has_shape(slot, view)) return FDP_OK;
  char argument[64], text[200], slot_text[200];
  if (second < 0) {
    snprintf(argument, sizeof argument, "%s[%d]", name, first);
  } else {
    snprintf(argument, sizeof argument, "%s[%d][%d]", name, first, second);
  }
  if (!has_dtype) {
    return fdp_fail(FDP_INVALID_TYPE, "%s: %s is %s, must be %s as the bucket", verb, argument,
                    fdp_dtype_name(view->dtype, text, sizeof text),
                    fdp_dtype_name(bucket->dtype, slot_text, sizeof slot_text));
  }
  fdp_view slot_view = fdp_bucket_slot(bucket, index, NULL, view->device);
  return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s has shape %s, must be %s as slot %d of the bucket",
                  verb, argument, fdp_view_shape_text(view, text, sizeof text),
                  fdp_view_shape_text(&slot_view, slot_text, sizeof slot_text), index);
}

fdp_status fdp_bucket_check_flat(const fdp_bucket *bucket, const fdp_view *flat, const char *verb,
                                 const char *name, int32_t index) {
  char argument[64], text[48], bucket_text[48];
  bool has_dtype = fdp_dtype_equal(flat->dtype, bucket->dtype);
  bool is_flat = flat->ndim == 1 && fdp_view_is_contiguous(flat);
  if (has_dtype && is_flat && fdp_view_size_bytes(flat) >= bucket->size_bytes) return FDP_OK;
  snprintf(argument, sizeof argument, index < 0 ? "%s" : "%s[%d]", name, index);
  if (!has_dtype) {
    return fdp_fail(FDP_INVALID_TYPE, "%s: %s is %s, must be %s as the bucket", verb, argument,
                    fdp_dtype_name(flat->dtype, text, sizeof text),
                    fdp_dtype_name(bucket->dtype, bucket_text, sizeof bucket_text));
  }
  if (!is_flat) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s has %d dimensions or gaps, must be contiguous "
                    "with one dimension", verb, argument, flat->ndim);
  }
  return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s has %" PRId64 " bytes, must have at least %" PRId64,
                  verb, argument, fdp_view_size_bytes(flat), bucket->size_bytes);
}
