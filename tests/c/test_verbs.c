/* Scatter, gather and broadcast: products of cases, and every refusal. */
#include "../../csrc/broadcast.h"
#include "../../csrc/counters.h"
#include "../../csrc/fault.h"
#include "../../csrc/gather.h"
#include "../../csrc/plan.h"
#include "../../csrc/scatter.h"
#include "cases.h"
#include "check.h"
#include "rig.h"

static const int32_t rank_counts[] = {1, 2, 3, 4, 7, 8};
static const fdp_dtype dtypes[] = {
    {FDP_CODE_UINT, 8, 1}, {FDP_CODE_BFLOAT, 16, 1}, {FDP_CODE_FLOAT, 32, 1},
    {FDP_CODE_INT, 64, 1}, {FDP_CODE_COMPLEX, 128, 1}, {FDP_CODE_FLOAT, 8, 3},
};

/* A shape of three dimensions whose `dim` is `length`. */
static void make_shape(int64_t *shape, int32_t dim, int64_t length) {
  shape[0] = 3;
  shape[1] = 2;
  shape[2] = 5;
  shape[dim] = length;
}

/* The row-major number, in `whole`, of element `index` of the slice from `start` on. */
static int64_t index_in_whole(const fdp_view *part, const fdp_view *whole, int32_t dim,
                              int64_t start, int64_t index) {
  int64_t at[FDP_MAX_DIMS];
  for (int32_t d = part->ndim - 1; d >= 0; --d) {
    at[d] = index % part->shape[d] + (d == dim ? start : 0);
    index /= part->shape[d];
  }
  int64_t number = 0;
  for (int32_t d = 0; d < whole->ndim; ++d) number = number * whole->shape[d] + at[d];
  return number;
}

/* Elements of the dtype hold as much of the number as they can. */
static int64_t as_stored(fdp_dtype dtype, int64_t value) {
  unsigned char element[16];
  rig_store(dtype, element, value);
  return rig_load(dtype, element);
}

static bool slices_equal(const fdp_view *whole, const rig_array *parts, int32_t part_count,
                         int32_t dim) {
  int64_t start = 0;
  for (int32_t r = 0; r < part_count; ++r) {
    const fdp_view *part = &parts[r].view;
    int64_t count = fdp_view_count_elems(part);
    for (int64_t i = 0; i < count; ++i) {
      int64_t other = index_in_whole(part, whole, dim, start, i);
      int64_t value = rig_load(part->dtype, rig_address(part, i));
      if (value != rig_load(whole->dtype, rig_address(whole, other))) return false;
    }
    start += part->shape[dim];
  }
  return true;
}

static bool holds_values_of(const rig_array *array, int32_t rank) {
  int64_t count = fdp_view_count_elems(&array->view);
  for (int64_t i = 0; i < count; ++i) {
    int64_t value = rig_load(array->view.dtype, rig_address(&array->view, i));
    if (value != as_stored(array->view.dtype, rig_value(rank, i))) return false;
  }
  return true;
}

/* Scatters a whole into chunks and gathers them into another whole. */
static void one_slicing(const rig *ranks, int32_t rank_count, fdp_dtype dtype, int64_t length,
                        int32_t dim, rig_layout source_layout, rig_layout target_layout) {
  int64_t shape[3], sizes[RIG_RANKS];
  make_shape(shape, dim, length);
  int32_t count = case_chunks(length, rank_count, sizes);
  rig_array source = rig_array_open(dtype, 3, shape, source_layout, ranks->ids[0]);
  rig_array back = rig_array_open(dtype, 3, shape, target_layout, ranks->ids[0]);
  rig_array parts[RIG_RANKS];
  fdp_view views[RIG_RANKS];
  for (int32_t r = 0; r < count; ++r) {
    shape[dim] = sizes[r];
    parts[r] = rig_array_open(dtype, 3, shape, target_layout, ranks->ids[r]);
    views[r] = parts[r].view;
  }
  rig_fill(&source, 0);
  fdp_verb_counters before = fdp_counters_read(FDP_VERB_SCATTER);
  CHECK_OK(fdp_scatter(ranks->context, &source.view, ranks->streams[0], views, ranks->streams,
                       count, dim));
  CHECK_OK(fdp_gather(ranks->context, views, ranks->streams, count, &back.view, ranks->streams[0],
                      dim));
  rig_finish(ranks);
  fdp_verb_counters after = fdp_counters_read(FDP_VERB_SCATTER);
  CHECK_EQUAL(after.calls - before.calls, 1);
  CHECK_EQUAL(after.bytes - before.bytes, fdp_view_size_bytes(&source.view));
  CHECK(slices_equal(&source.view, parts, count, dim));
  if (source_layout != RIG_EXPANDED) CHECK(holds_values_of(&back, 0));
  CHECK(rig_guards_hold(&back));
  for (int32_t r = 0; r < count; ++r) {
    CHECK(rig_guards_hold(&parts[r]));
    rig_array_close(&parts[r]);
  }
  rig_array_close(&source);
  rig_array_close(&back);
}

static void one_broadcast(const rig *ranks, int32_t rank_count, fdp_dtype dtype, int64_t length,
                          rig_layout source_layout, rig_layout target_layout) {
  int64_t shape[3];
  make_shape(shape, 1, length);
  rig_array source = rig_array_open(dtype, 3, shape, source_layout, ranks->ids[0]);
  rig_array targets[RIG_RANKS];
  fdp_view views[RIG_RANKS];
  for (int32_t r = 0; r < rank_count; ++r) {
    targets[r] = rig_array_open(dtype, 3, shape, target_layout, ranks->ids[r]);
    views[r] = targets[r].view;
  }
  rig_fill(&source, 5);
  /* The last target is the source itself, which is skipped. */
  if (rank_count > 1 && source_layout != RIG_EXPANDED) views[rank_count - 1] = source.view;
  CHECK_OK(fdp_broadcast(ranks->context, &source.view, ranks->streams[0], views, ranks->streams,
                         rank_count));
  rig_finish(ranks);
  int64_t count = fdp_view_count_elems(&source.view);
  for (int32_t r = 0; r < rank_count; ++r) {
    bool equal = true;
    for (int64_t i = 0; i < count; ++i) {
      if (rig_load(dtype, rig_address(&views[r], i)) !=
          rig_load(dtype, rig_address(&source.view, i))) {
        equal = false;
      }
    }
    CHECK(equal);
    CHECK(rig_guards_hold(&targets[r]));
    rig_array_close(&targets[r]);
  }
  rig_array_close(&source);
}

static void test_products(rig_means means) {
  rig ranks;
  rig_open(&ranks, means);
  for (size_t n = 0; n < sizeof rank_counts / sizeof rank_counts[0]; ++n) {
    int32_t count = rank_counts[n];
    const int64_t lengths[] = {0, 1, 13, count * 4 - 1, count * 4, count * 4 + 1};
    for (size_t l = 0; l < 6; ++l) {
      for (int32_t layout = 0; layout < RIG_LAYOUT_COUNT; ++layout) {
        /* Each pair of layouts with each dtype would only repeat: the pairs walk together. */
        for (int32_t target = 0; target < RIG_EXPANDED; ++target) {
          fdp_dtype dtype = dtypes[(size_t)(layout + target + (int32_t)l) % 6];
          int32_t dim = (layout + (int32_t)l) % 3;
          check_case("%d ranks, length %d, layouts %d and %d, dtype (%d, %d, %d), dim %d", count,
                     (int)lengths[l], layout, target, dtype.code, dtype.bits, dtype.lanes, dim);
          one_slicing(&ranks, count, dtype, lengths[l], dim, (rig_layout)layout,
                      (rig_layout)target);
          one_broadcast(&ranks, count, dtype, lengths[l], (rig_layout)layout, (rig_layout)target);
        }
      }
    }
  }
  check_case("%s", "");
  rig_close(&ranks);
}

/* --- refusals --- */

static void test_scatter_refuses(fdp_context *context) {
  rig_array whole = rig_array_open(float32, 2, (int64_t[]){4, 3}, RIG_ROWS, host);
  rig_array a = rig_array_open(float32, 2, (int64_t[]){2, 3}, RIG_ROWS, host);
  rig_array b = rig_array_open(float32, 2, (int64_t[]){2, 3}, RIG_ROWS, host);
  fdp_view parts[2] = {a.view, b.view};
#define SCATTER(count, dim) fdp_scatter(context, &whole.view, NULL, parts, NULL, (count), (dim))
  CHECK_OK(SCATTER(2, 0));
  CHECK_FAILS(SCATTER(0, 0), FDP_INVALID_ARGUMENT,
              "scatter: number of targets is 0, must be 1 to 64");
  CHECK_FAILS(SCATTER(65, 0), FDP_INVALID_ARGUMENT,
              "scatter: number of targets is 65, must be 1 to 64");
  CHECK_FAILS(SCATTER(2, 2), FDP_INVALID_ARGUMENT,
              "scatter: dim is 2, must be 0 to 1, since source has shape (4, 3)");
  CHECK_FAILS(SCATTER(2, -1), FDP_INVALID_ARGUMENT,
              "scatter: dim is -1, must be 0 to 1, since source has shape (4, 3)");
  CHECK_FAILS(SCATTER(1, 0), FDP_INVALID_ARGUMENT,
              "scatter: sizes of targets along dimension 0 add up to 2, must be 4 as source");
  parts[1].shape[1] = 4;
  CHECK_FAILS(SCATTER(2, 0), FDP_INVALID_ARGUMENT, "scatter: targets[1] has shape (2, 4), but for "
              "dimension 0 it must be (4, 3) as source");
  parts[1] = b.view;
  parts[1].shape[0] = 3;
  CHECK_FAILS(SCATTER(2, 0), FDP_INVALID_ARGUMENT, "scatter: targets[1] has shape (3, 3), but "
              "dimension 0 must be at most 2, what the ones before it left of source (4, 3)");
  parts[1] = b.view;
  parts[1].dtype = int32;
  CHECK_FAILS(SCATTER(2, 0), FDP_INVALID_TYPE,
              "scatter: targets[1] is int32, must be float32 as source");
  parts[1] = b.view;
  parts[1].strides[0] = 0;
  CHECK_FAILS(SCATTER(2, 0), FDP_INVALID_ARGUMENT,
              "scatter: targets[1] overlaps itself, must not, since it is written");
  parts[1] = a.view;
  CHECK_FAILS(SCATTER(2, 0), FDP_INVALID_ARGUMENT,
              "scatter: targets[1] overlaps targets[0], must not, since both are written");
  parts[1] = b.view;
  parts[1].data = whole.view.data;
  CHECK_FAILS(SCATTER(2, 0), FDP_INVALID_ARGUMENT,
              "scatter: targets[1] overlaps source, must not");
  parts[1] = b.view;
  fdp_view scalar = whole.view;
  scalar.ndim = 0;
  CHECK_FAILS(fdp_scatter(context, &scalar, NULL, parts, NULL, 2, 0), FDP_INVALID_ARGUMENT,
              "scatter: source has shape (), must have at least one dimension");
  parts[1].device = (fdp_device_id){FDP_DEVICE_CUDA, 1};
#ifndef FDP_WITH_CUDA
  CHECK_FAILS(SCATTER(2, 0), FDP_UNSUPPORTED, "device cuda:1: this build has no CUDA backend");
#endif
  parts[1] = b.view;
  fdp_fault_arm(FDP_FAULT_SCATTER, 2);
  CHECK_OK(SCATTER(2, 0));
  CHECK_FAILS(SCATTER(2, 0), FDP_FAULT_INJECTED, "scatter: this call was told to fail");
  CHECK_OK(SCATTER(2, 0));
  rig_array_close(&whole);
  rig_array_close(&a);
  rig_array_close(&b);
}

static void test_gather_refuses(fdp_context *context) {
  rig_array whole = rig_array_open(float32, 2, (int64_t[]){4, 3}, RIG_ROWS, host);
  rig_array a = rig_array_open(float32, 2, (int64_t[]){2, 3}, RIG_ROWS, host);
  fdp_view parts[2] = {a.view, a.view}; /* sources may overlap */
#define GATHER(count, dim) fdp_gather(context, parts, NULL, (count), &whole.view, NULL, (dim))
  CHECK_OK(GATHER(2, 0));
  CHECK_FAILS(GATHER(0, 0), FDP_INVALID_ARGUMENT,
              "gather: number of sources is 0, must be 1 to 64");
  CHECK_FAILS(GATHER(1, 0), FDP_INVALID_ARGUMENT,
              "gather: sizes of sources along dimension 0 add up to 2, must be 4 as target");
  CHECK_FAILS(GATHER(2, 1), FDP_INVALID_ARGUMENT, "gather: sources[0] has shape (2, 3), but for "
              "dimension 1 it must be (4, 3) as target");
  parts[0].dtype = uint8;
  CHECK_FAILS(GATHER(2, 0), FDP_INVALID_TYPE,
              "gather: sources[0] is uint8, must be float32 as target");
  parts[0] = a.view;
  parts[0].data = whole.view.data;
  CHECK_FAILS(GATHER(2, 0), FDP_INVALID_ARGUMENT, "gather: sources[0] overlaps target, must not");
  parts[0] = a.view;
  whole.view.strides[0] = 1;
  CHECK_FAILS(GATHER(2, 0), FDP_INVALID_ARGUMENT,
              "gather: target overlaps itself, must not, since it is written");
  whole.view.strides[0] = 3;
  fdp_fault_arm(FDP_FAULT_GATHER, 1);
  CHECK_FAILS(GATHER(2, 0), FDP_FAULT_INJECTED, "gather: this call was told to fail");
  CHECK_OK(GATHER(2, 0));
  rig_array_close(&whole);
  rig_array_close(&a);
}

static void test_broadcast_refuses(fdp_context *context) {
  rig_array source = rig_array_open(float32, 1, (int64_t[]){6}, RIG_ROWS, host);
  rig_array target = rig_array_open(float32, 1, (int64_t[]){6}, RIG_ROWS, host);
  fdp_view views[2] = {source.view, target.view};
#define BROADCAST(count) fdp_broadcast(context, &source.view, NULL, views, NULL, (count))
  CHECK_OK(BROADCAST(2));
  CHECK_FAILS(BROADCAST(-1), FDP_INVALID_ARGUMENT,
              "broadcast: number of targets is -1, must be 1 to 64");
  views[1].shape[0] = 5;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT,
              "broadcast: targets[1] has shape (5,), must be (6,) as source");
  views[1] = target.view;
  views[1].dtype = (fdp_dtype){FDP_CODE_FLOAT, 8, 4};
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_TYPE,
              "broadcast: targets[1] is dtype(2,8,4), must be float32 as source");
  views[1] = target.view;
  views[0].data = (char *)source.view.data + 4;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT,
              "broadcast: targets[0] overlaps source, must not unless it is the same view");
  views[0] = target.view;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT,
              "broadcast: targets[1] overlaps targets[0], must not, since both are written");
  fdp_fault_arm(FDP_FAULT_BROADCAST, 1);
  CHECK_FAILS(BROADCAST(2), FDP_FAULT_INJECTED, "broadcast: this call was told to fail");
  rig_array_close(&source);
  rig_array_close(&target);
}

void test_verbs(void) {
  for (int32_t means = 0; means < RIG_MEANS_COUNT; ++means) test_products((rig_means)means);
  fdp_context *context = NULL;
  CHECK_OK(fdp_context_open(&context));
  test_scatter_refuses(context);
  test_gather_refuses(context);
  test_broadcast_refuses(context);
  fdp_context_close(context);
}
