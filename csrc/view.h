/* A view: a typed, strided window on somebody else's memory. It owns nothing; whoever made it keeps
 * the memory alive for as long as the view is used. All arithmetic is checked: a view that passed
 * fdp_view_check can be walked without overflow. Pure: any thread, no streams, no device
 * headers. */
#ifndef FDP_VIEW_H
#define FDP_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dtype.h"
#include "limits.h"
#include "status.h"

/* DLPack's device numbers. */
typedef enum fdp_device_kind {
  FDP_DEVICE_HOST = 1,
  FDP_DEVICE_CUDA = 2,
  FDP_DEVICE_CUDA_PINNED = 3 /* host memory; treated as FDP_DEVICE_HOST wherever bytes are moved */
} fdp_device_kind;

typedef struct fdp_device_id {
  int32_t kind;    /* fdp_device_kind */
  int32_t ordinal; /* torch's index; 0 for the host */
} fdp_device_id;

typedef struct fdp_view {
  void *data; /* address of element (0, ..., 0); may be NULL when the view has no elements */
  fdp_device_id device;
  fdp_dtype dtype;
  int32_t ndim;
  int64_t shape[FDP_MAX_DIMS];   /* only the first ndim entries are set */
  int64_t strides[FDP_MAX_DIMS]; /* in elements; may be zero or negative */
} fdp_view;

/* Refuses: ndim out of bounds, negative sizes, an element count, byte count or address range that
 * overflows, a dtype that does not fill whole bytes, NULL data with elements, data not aligned to
 * its element. `name` names the argument in the message, e.g. "source" or "targets[2]". */
fdp_status fdp_view_check(const fdp_view *view, const char *name);

/* Number of elements; 1 for ndim 0. The view has been checked. */
int64_t fdp_view_count_elems(const fdp_view *view);
int64_t fdp_view_size_bytes(const fdp_view *view);
/* First byte and one past the last byte touched; equal when there are no elements. */
void fdp_view_extent(const fdp_view *view, const char **begin, const char **end);

bool fdp_view_is_contiguous(const fdp_view *view);
/* Every address of its extent is an element and belongs to one index: some order of the dimensions
 * makes it contiguous. */
bool fdp_view_is_dense(const fdp_view *view);
/* True if two indices may share an address: fine to read, refused for writing. Exact for dense and
 * for zero-stride views; may err to true for exotic strides. */
bool fdp_view_overlaps_itself(const fdp_view *view);
/* True if the two may share a byte (on one device). Exact when their extents are apart, when they
 * are dense, and for ranges of columns of one matrix; may err to true for exotic strides. */
bool fdp_views_overlap(const fdp_view *a, const fdp_view *b);
bool fdp_view_same_shape(const fdp_view *a, const fdp_view *b);
/* Same shape, and the same strides wherever a dimension has more than one element. */
bool fdp_view_same_layout(const fdp_view *a, const fdp_view *b);

/* Where the memory is: pinned host memory is the host. */
fdp_device_id fdp_device_place(fdp_device_id id);
/* True if both name the same memory (fdp_device_place). */
bool fdp_device_equal(fdp_device_id a, fdp_device_id b);
/* "cpu:0", "cuda:1"; writes at most `size_bytes` bytes and returns `text`. */
const char *fdp_device_text(fdp_device_id id, char *text, size_t size_bytes);

/* The slice [start, start + length) along `dim`; dim and range have been checked. */
fdp_view fdp_view_narrow(const fdp_view *view, int32_t dim, int64_t start, int64_t length);

/* "(2, 3)"; writes at most `size_bytes` bytes and returns `text`. */
const char *fdp_view_shape_text(const fdp_view *view, char *text, size_t size_bytes);

#endif
