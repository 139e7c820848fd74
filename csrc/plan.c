#include "plan.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One dimension of a copy; strides in bytes, the target's never negative. */
typedef struct plan_dim {
  int64_t size;
  int64_t target_stride;
  int64_t source_stride;
} plan_dim;

void fdp_copy_list_init(fdp_copy_list *list) {
  list->copies = list->inline_copies;
  list->count = 0;
  list->capacity = FDP_PLAN_INLINE_COPIES;
  list->size_bytes = 0;
}

void fdp_copy_list_drop(fdp_copy_list *list) {
  if (list->copies != list->inline_copies) free(list->copies);
  fdp_copy_list_init(list);
}

static fdp_status list_grow(fdp_copy_list *list, int64_t added) {
  int64_t needed = list->count + added;
  if (needed <= list->capacity) return FDP_OK;
  int64_t capacity = 2 * (int64_t)list->capacity;
  if (capacity < needed) capacity = needed;
  fdp_strided_copy *copies = NULL;
  if (capacity <= INT32_MAX) copies = malloc((size_t)capacity * sizeof *copies);
  if (!copies) {
    return fdp_fail(FDP_OUT_OF_MEMORY, "plan: no host memory for %" PRId64 " strided copies",
                    capacity);
  }
  memcpy(copies, list->copies, (size_t)list->count * sizeof *copies);
  if (list->copies != list->inline_copies) free(list->copies);
  list->copies = copies;
  list->capacity = (int32_t)capacity;
  return FDP_OK;
}

/* The dimensions of more than one element, the target's largest stride first. A negative stride of
 * the target is turned round on both sides, which moves the starts. */
static int32_t sort_dims(const fdp_view *target, const fdp_view *source, fdp_strided_copy *copy,
                         plan_dim *dims) {
  int64_t item_bytes = copy->item_bytes;
  char *target_start = target->data;
  const char *source_start = source->data;
  int32_t count = 0;
  for (int32_t d = 0; d < target->ndim; ++d) {
    if (target->shape[d] == 1) continue;
    plan_dim dim = {target->shape[d], target->strides[d] * item_bytes,
                    source->strides[d] * item_bytes};
    if (dim.target_stride < 0) {
      target_start += (dim.size - 1) * dim.target_stride;
      source_start += (dim.size - 1) * dim.source_stride;
      dim.target_stride = -dim.target_stride;
      dim.source_stride = -dim.source_stride;
    }
    int32_t at = count++;
    for (; at > 0 && dims[at - 1].target_stride < dim.target_stride; --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }
  copy->target = target_start;
  copy->source = source_start;
  return count;
}

/* True if a step of `outer_stride` goes on where `size` steps of `stride` end. Of a view that was
 * checked, the last step fits into 64 bits, and one more may not. */
static bool goes_on(int64_t outer_stride, int64_t size, int64_t stride) {
  int64_t end;
  return !__builtin_mul_overflow(size, stride, &end) && outer_stride == end;
}

/* Neighbours that are one dimension on both sides become one; then what is contiguous on both sides
 * becomes part of the item. */
static int32_t merge_dims(plan_dim *dims, int32_t count, int64_t *item_bytes) {
  int32_t merged = 0;
  for (int32_t i = 0; i < count; ++i) {
    plan_dim *outer = merged > 0 ? &dims[merged - 1] : NULL;
    if (outer && goes_on(outer->target_stride, dims[i].size, dims[i].target_stride) &&
        goes_on(outer->source_stride, dims[i].size, dims[i].source_stride)) {
      outer->size *= dims[i].size;
      outer->target_stride = dims[i].target_stride;
      outer->source_stride = dims[i].source_stride;
    } else {
      dims[merged++] = dims[i];
    }
  }
  if (merged > 0 && dims[merged - 1].target_stride == *item_bytes &&
      dims[merged - 1].source_stride == *item_bytes) {
    *item_bytes *= dims[merged - 1].size;
    --merged;
  }
  return merged;
}

/* `copy` once for each index of the outer dimensions, which it has no room for. */
static fdp_status add_split(fdp_copy_list *list, const fdp_strided_copy *copy,
                            const plan_dim *outer, int32_t outer_count) {
  int64_t pieces = 1;
  for (int32_t i = 0; i < outer_count; ++i) {
    if (__builtin_mul_overflow(pieces, outer[i].size, &pieces) || pieces > INT32_MAX) {
      return fdp_fail(FDP_UNSUPPORTED, "plan: a copy of %d dimensions that do not merge needs more "
                      "than %d strided copies", outer_count + copy->ndim, INT32_MAX);
    }
  }
  fdp_status status = list_grow(list, pieces);
  if (status != FDP_OK) return status;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    fdp_strided_copy *added = &list->copies[list->count++];
    *added = *copy;
    int64_t rest = piece;
    for (int32_t i = outer_count - 1; i >= 0; --i) {
      int64_t index = rest % outer[i].size;
      rest /= outer[i].size;
      added->target = (char *)added->target + index * outer[i].target_stride;
      added->source = (const char *)added->source + index * outer[i].source_stride;
    }
  }
  return FDP_OK;
}

fdp_status fdp_plan_copy(fdp_copy_list *list, const fdp_view *target, const fdp_view *source) {
  assert(fdp_view_same_shape(target, source));
  assert(fdp_dtype_bytes(target->dtype) == fdp_dtype_bytes(source->dtype));
  int64_t size_bytes = fdp_view_size_bytes(target);
  if (size_bytes == 0) return FDP_OK;
  plan_dim dims[FDP_MAX_DIMS];
  fdp_strided_copy copy = {.item_bytes = (int64_t)fdp_dtype_bytes(target->dtype)};
  int32_t count = sort_dims(target, source, &copy, dims);
  count = merge_dims(dims, count, &copy.item_bytes);
  int32_t outer_count = count > FDP_COPY_MAX_DIMS ? count - FDP_COPY_MAX_DIMS : 0;
  copy.ndim = count - outer_count;
  for (int32_t i = 0; i < copy.ndim; ++i) {
    copy.shape[i] = dims[outer_count + i].size;
    copy.target_strides_bytes[i] = dims[outer_count + i].target_stride;
    copy.source_strides_bytes[i] = dims[outer_count + i].source_stride;
  }
  fdp_status status = add_split(list, &copy, dims, outer_count);
  if (status == FDP_OK) list->size_bytes += size_bytes;
  return status;
}

fdp_status fdp_plan_slices(fdp_copy_list *list, const fdp_view *whole, const fdp_view *parts,
                           int32_t part_count, int32_t dim, fdp_plan_direction direction,
                           int32_t *copy_counts) {
  int64_t start = 0;
  for (int32_t i = 0; i < part_count; ++i) {
    int64_t length = parts[i].shape[dim];
    fdp_view slice = fdp_view_narrow(whole, dim, start, length);
    const fdp_view *target = direction == FDP_PLAN_SCATTER ? &parts[i] : &slice;
    const fdp_view *source = direction == FDP_PLAN_SCATTER ? &slice : &parts[i];
    int32_t before = list->count;
    fdp_status status = fdp_plan_copy(list, target, source);
    if (status != FDP_OK) return status;
    copy_counts[i] = list->count - before;
    start += length;
  }
  return FDP_OK;
}
