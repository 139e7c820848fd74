#include "view.h"

#include <inttypes.h>
#include <stdio.h>

/* What fdp_view_check promises to later callers: all products and sums below fit into int64_t. */

static fdp_status check_shape(const fdp_view *view, const char *name, int64_t *count_elems) {
  int64_t count = 1;
  bool empty = false;
  for (int32_t d = 0; d < view->ndim; ++d) {
    int64_t size = view->shape[d];
    if (size < 0) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: size of dimension %d is %" PRId64
                      ", must not be negative", name, d, size);
    }
    if (size == 0) empty = true;
  }
  for (int32_t d = 0; d < view->ndim && !empty; ++d) {
    if (__builtin_mul_overflow(count, view->shape[d], &count)) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: number of elements overflows at dimension %d of "
                      "size %" PRId64 ", must be at most %" PRId64, name, d, view->shape[d],
                      INT64_MAX);
    }
  }
  *count_elems = empty ? 0 : count;
  return FDP_OK;
}

/* The lowest and highest element offset, in bytes, and the address range that they give. */
static fdp_status check_range(const fdp_view *view, const char *name, int64_t item_bytes) {
  int64_t low = 0;
  int64_t high = item_bytes;
  for (int32_t d = 0; d < view->ndim; ++d) {
    int64_t reach;
    int64_t *end = view->strides[d] < 0 ? &low : &high;
    if (__builtin_mul_overflow(view->shape[d] - 1, view->strides[d], &reach) ||
        __builtin_mul_overflow(reach, item_bytes, &reach) ||
        __builtin_add_overflow(*end, reach, end)) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: address range overflows at dimension %d of size %"
                      PRId64 " and stride %" PRId64 ", must be at most %" PRId64 " bytes", name, d,
                      view->shape[d], view->strides[d], INT64_MAX);
    }
  }
  uintptr_t address = (uintptr_t)view->data;
  int64_t span; /* from the first byte to the last: a sum of absolute steps fits too */
  if ((uintptr_t)-(low + 1) + 1 >= address || address + (uintptr_t)high < address ||
      __builtin_sub_overflow(high, low, &span)) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: bytes %" PRId64 " to %" PRId64
                    " around data %p leave the address space", name, low, high, view->data);
  }
  return FDP_OK;
}

fdp_status fdp_view_check(const fdp_view *view, const char *name) {
  if (view->ndim < 0 || view->ndim > FDP_MAX_DIMS) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: number of dimensions is %d, must be 0 to %d", name,
                    view->ndim, FDP_MAX_DIMS);
  }
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  if (item_bytes == 0) {
    char text[48];
    return fdp_fail(FDP_INVALID_TYPE, "%s: elements of %s are %d bits, must fill whole bytes", name,
                    fdp_dtype_name(view->dtype, text, sizeof text),
                    view->dtype.bits * view->dtype.lanes);
  }
  int64_t count_elems = 0;
  fdp_status status = check_shape(view, name, &count_elems);
  if (status != FDP_OK || count_elems == 0) return status;
  int64_t size_bytes;
  if (__builtin_mul_overflow(count_elems, item_bytes, &size_bytes)) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: size of %" PRId64 " elements of %" PRId64
                    " bytes overflows, must be at most %" PRId64 " bytes", name, count_elems,
                    item_bytes, INT64_MAX);
  }
  if (!view->data) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: data is NULL, but there are %" PRId64 " elements",
                    name, count_elems);
  }
  /* Complex numbers are aligned as their parts; odd sizes, which only get moved, to one byte. */
  unsigned bits = view->dtype.bits;
  if (view->dtype.code == FDP_CODE_COMPLEX && bits % 2 == 0) bits /= 2;
  uintptr_t alignment = bits % 8 == 0 ? bits / 8 : 1;
  if (alignment > 1 && (alignment & (alignment - 1)) == 0 &&
      (uintptr_t)view->data % alignment != 0) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: data %p is not aligned, must be a multiple of %zu "
                    "bytes", name, view->data, (size_t)alignment);
  }
  return check_range(view, name, item_bytes);
}

int64_t fdp_view_count_elems(const fdp_view *view) {
  int64_t count = 1;
  for (int32_t d = 0; d < view->ndim; ++d) {
    if (view->shape[d] == 0) return 0; /* before the product of the others may overflow */
  }
  for (int32_t d = 0; d < view->ndim; ++d) count *= view->shape[d];
  return count;
}

int64_t fdp_view_size_bytes(const fdp_view *view) {
  return fdp_view_count_elems(view) * (int64_t)fdp_dtype_bytes(view->dtype);
}

void fdp_view_extent(const fdp_view *view, const char **begin, const char **end) {
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  int64_t low = 0;
  int64_t high = item_bytes;
  *begin = *end = view->data;
  for (int32_t d = 0; d < view->ndim; ++d) {
    if (view->shape[d] == 0) return; /* strides of nothing are never checked: look no further */
  }
  for (int32_t d = 0; d < view->ndim; ++d) {
    int64_t reach = (view->shape[d] - 1) * view->strides[d] * item_bytes;
    if (reach < 0) low += reach;
    if (reach > 0) high += reach;
  }
  *begin += low;
  *end += high;
}

bool fdp_view_is_contiguous(const fdp_view *view) {
  if (fdp_view_count_elems(view) == 0) return true;
  int64_t expected = 1;
  for (int32_t d = view->ndim - 1; d >= 0; --d) {
    if (view->shape[d] == 1) continue;
    if (view->strides[d] != expected) return false;
    expected *= view->shape[d];
  }
  return true;
}

/* The dimensions of more than one element, by stride, the smallest first. */
static int32_t sort_dims(const fdp_view *view, int64_t *shape, int64_t *strides) {
  int32_t count = 0;
  for (int32_t d = view->ndim - 1; d >= 0; --d) {
    if (view->shape[d] == 1) continue;
    int64_t stride = view->strides[d] < 0 ? -view->strides[d] : view->strides[d];
    int32_t at = count++;
    for (; at > 0 && strides[at - 1] > stride; --at) {
      shape[at] = shape[at - 1];
      strides[at] = strides[at - 1];
    }
    shape[at] = view->shape[d];
    strides[at] = stride;
  }
  return count;
}

bool fdp_view_is_dense(const fdp_view *view) {
  if (fdp_view_is_contiguous(view)) return true;
  int64_t shape[FDP_MAX_DIMS];
  int64_t strides[FDP_MAX_DIMS];
  for (int32_t d = 0; d < view->ndim; ++d) {
    /* A negative stride covers the same bytes, but not from `data` on: no plain copy. */
    if (view->shape[d] > 1 && view->strides[d] < 0) return false;
  }
  int32_t count = sort_dims(view, shape, strides);
  int64_t expected = 1;
  for (int32_t i = 0; i < count; ++i) {
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

bool fdp_view_overlaps_itself(const fdp_view *view) {
  if (fdp_view_count_elems(view) <= 1) return false;
  int64_t shape[FDP_MAX_DIMS];
  int64_t strides[FDP_MAX_DIMS];
  int32_t count = sort_dims(view, shape, strides);
  int64_t reach = 0; /* from the first to the last element of the dimensions so far */
  for (int32_t i = 0; i < count; ++i) {
    if (strides[i] <= reach) return true;
    reach += (shape[i] - 1) * strides[i];
  }
  return false;
}

/* The dimension of the largest step, or -1. */
static int32_t outermost_dim(const fdp_view *view) {
  int32_t outermost = -1;
  int64_t largest = 0;
  for (int32_t d = 0; d < view->ndim; ++d) {
    if (view->shape[d] <= 1) continue; /* its stride may be any, also one that has no negative */
    int64_t stride = view->strides[d] < 0 ? -view->strides[d] : view->strides[d];
    if (stride <= largest) continue;
    outermost = d;
    largest = stride;
  }
  return outermost;
}

/* True if both repeat at the same distance and lie in each other's gaps, as two ranges of columns
 * of one matrix do. False if that cannot be told. */
static bool lie_side_by_side(const fdp_view *a, const fdp_view *b) {
  int32_t dim_a = outermost_dim(a);
  int32_t dim_b = outermost_dim(b);
  if (dim_a < 0 || dim_b < 0) return false;
  int64_t step_a = a->strides[dim_a] * (int64_t)fdp_dtype_bytes(a->dtype);
  int64_t step_b = b->strides[dim_b] * (int64_t)fdp_dtype_bytes(b->dtype);
  int64_t step = step_a < 0 ? -step_a : step_a;
  if (step_b != step && step_b != -step) return false;
  const char *begin_a, *end_a, *begin_b, *end_b;
  fdp_view row_a = fdp_view_narrow(a, dim_a, 0, 1);
  fdp_view row_b = fdp_view_narrow(b, dim_b, 0, 1);
  fdp_view_extent(&row_a, &begin_a, &end_a);
  fdp_view_extent(&row_b, &begin_b, &end_b);
  uintptr_t at_a = (uintptr_t)begin_a; /* may be further apart than a signed number tells */
  uintptr_t at_b = (uintptr_t)begin_b;
  int64_t distance = (int64_t)((at_b > at_a ? at_b - at_a : at_a - at_b) % (uintptr_t)step);
  if (at_b < at_a && distance > 0) distance = step - distance;
  return distance >= end_a - begin_a && distance <= step - (end_b - begin_b);
}

bool fdp_views_overlap(const fdp_view *a, const fdp_view *b) {
  const char *begin_a, *end_a, *begin_b, *end_b;
  if (!fdp_device_equal(a->device, b->device)) return false;
  fdp_view_extent(a, &begin_a, &end_a);
  fdp_view_extent(b, &begin_b, &end_b);
  if (begin_a >= end_a || begin_b >= end_b || begin_a >= end_b || begin_b >= end_a) return false;
  return !lie_side_by_side(a, b);
}

bool fdp_view_same_shape(const fdp_view *a, const fdp_view *b) {
  if (a->ndim != b->ndim) return false;
  for (int32_t d = 0; d < a->ndim; ++d) {
    if (a->shape[d] != b->shape[d]) return false;
  }
  return true;
}

bool fdp_view_same_layout(const fdp_view *a, const fdp_view *b) {
  if (!fdp_view_same_shape(a, b)) return false;
  for (int32_t d = 0; d < a->ndim; ++d) {
    if (a->shape[d] > 1 && a->strides[d] != b->strides[d]) return false;
  }
  return true;
}

fdp_device_id fdp_device_place(fdp_device_id id) {
  if (id.kind == FDP_DEVICE_CUDA_PINNED) return (fdp_device_id){FDP_DEVICE_HOST, 0};
  return id;
}

bool fdp_device_equal(fdp_device_id a, fdp_device_id b) {
  a = fdp_device_place(a);
  b = fdp_device_place(b);
  return a.kind == b.kind && a.ordinal == b.ordinal;
}

const char *fdp_device_text(fdp_device_id id, char *text, size_t size_bytes) {
  switch (id.kind) {
    case FDP_DEVICE_HOST: snprintf(text, size_bytes, "cpu:%d", id.ordinal); break;
    case FDP_DEVICE_CUDA: snprintf(text, size_bytes, "cuda:%d", id.ordinal); break;
    case FDP_DEVICE_CUDA_PINNED: snprintf(text, size_bytes, "pinned:%d", id.ordinal); break;
    default: snprintf(text, size_bytes, "device(%d,%d)", id.kind, id.ordinal); break;
  }
  return text;
}

fdp_view fdp_view_narrow(const fdp_view *view, int32_t dim, int64_t start, int64_t length) {
  fdp_view part = {.device = view->device, .dtype = view->dtype, .ndim = view->ndim};
  for (int32_t d = 0; d < view->ndim; ++d) {
    part.shape[d] = view->shape[d];
    part.strides[d] = view->strides[d];
  }
  part.shape[dim] = length;
  part.data = view->data;
  /* An empty view may have no memory, or a start one past its end. */
  if (fdp_view_count_elems(&part) > 0) {
    part.data = (char *)view->data + start * view->strides[dim] *
                                         (int64_t)fdp_dtype_bytes(view->dtype);
  }
  return part;
}

const char *fdp_view_shape_text(const fdp_view *view, char *text, size_t size_bytes) {
  if (size_bytes == 0) return text;
  size_t used = 0;
  text[0] = '\0';
  for (int32_t d = 0; d < view->ndim && used < size_bytes; ++d) {
    int written = snprintf(text + used, size_bytes - used, d == 0 ? "(%" PRId64 : ", %" PRId64,
                           view->shape[d]);
    if (written < 0) return text;
    used += (size_t)written;
  }
  if (used < size_bytes) {
    snprintf(text + used, size_bytes - used, view->ndim == 0 ? "()" : view->ndim == 1 ? ",)" : ")");
  }
  return text;
}
