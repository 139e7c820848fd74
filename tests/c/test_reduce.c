/* Reduce: products of cases with exact sums, and every refusal. */
#include <string.h>

#include "../../csrc/counters.h"
#include "../../csrc/fault.h"
#include "../../csrc/reduce.h"
#include "check.h"
#include "rig.h"

static const int32_t rank_counts[] = {1, 2, 3, 4, 7, 8};

/* What a sum of integers is in `dtype`: wrapped, or or-ed. All used here fit a float exactly. */
static int64_t wrapped(fdp_dtype dtype, int64_t sum) {
  if (dtype.code == FDP_CODE_BOOL) return sum != 0;
  return dtype.code == FDP_CODE_UINT && dtype.bits == 8 ? sum & 0xFF : sum;
}

static void fill_for_sum(const rig_array *array, int32_t rank, bool is_bool) {
  int64_t count = fdp_view_count_elems(&array->view);
  for (int64_t i = 0; i < count; ++i) {
    int64_t value = is_bool ? (rank + i) % 3 == 0 : rig_value(rank, i);
    rig_store(array->view.dtype, rig_address(&array->view, i), value);
  }
}

static void one_reduce(const rig *ranks, int32_t rank_count, fdp_dtype dtype, int64_t length,
                       rig_layout source_layout, rig_layout target_layout, bool in_place) {
  int64_t shape[] = {2, length, 3};
  rig_array sources[RIG_RANKS];
  fdp_view views[RIG_RANKS];
  bool is_bool = dtype.code == FDP_CODE_BOOL;
  for (int32_t r = 0; r < rank_count; ++r) {
    /* Ranks take turns with other layouts, so that some are staged and some are not. */
    rig_layout layout = r % 2 == 0 ? source_layout : target_layout;
    sources[r] = rig_array_open(dtype, 3, shape, layout, ranks->ids[r]);
    views[r] = sources[r].view;
    fill_for_sum(&sources[r], r, is_bool);
  }
  rig_array target = rig_array_open(dtype, 3, shape, target_layout, ranks->ids[0]);
  int32_t last = rank_count - 1;
  if (in_place) {
    fill_for_sum(&target, last, is_bool);
    views[last] = target.view;
  }
  int64_t count = fdp_view_count_elems(&target.view);
  int64_t wanted[200];
  CHECK(count <= 200);
  for (int64_t i = 0; i < count; ++i) {
    wanted[i] = 0;
    for (int32_t r = 0; r < rank_count; ++r) {
      wanted[i] += rig_load(dtype, rig_address(&views[r], i));
    }
  }
  CHECK_OK(fdp_reduce(ranks->context, views, ranks->streams, rank_count, &target.view,
                      in_place ? ranks->streams[last] : ranks->streams[0]));
  rig_finish(ranks);
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    wrong += rig_load(dtype, rig_address(&target.view, i)) != wrapped(dtype, wanted[i]);
  }
  CHECK_EQUAL(wrong, 0);
  CHECK(rig_guards_hold(&target));
  for (int32_t r = 0; r < rank_count; ++r) rig_array_close(&sources[r]);
  rig_array_close(&target);
}

static void test_products(rig_means means) {
  static const fdp_dtype dtypes[] = {{FDP_CODE_FLOAT, 32, 1}, {FDP_CODE_FLOAT, 64, 1},
                                     {FDP_CODE_INT, 32, 1},   {FDP_CODE_INT, 64, 1},
                                     {FDP_CODE_UINT, 8, 1},   {FDP_CODE_BOOL, 8, 1}};
  rig ranks;
  rig_open(&ranks, means);
  fdp_verb_counters before = fdp_counters_read(FDP_VERB_REDUCE);
  int64_t calls = 0;
  for (size_t n = 0; n < sizeof rank_counts / sizeof rank_counts[0]; ++n) {
    const int64_t lengths[] = {0, 1, 13, 31};
    for (size_t l = 0; l < 4; ++l) {
      for (int32_t source = 0; source < RIG_LAYOUT_COUNT; ++source) {
        for (int32_t target = 0; target < RIG_EXPANDED; ++target) {
          fdp_dtype dtype = dtypes[(size_t)(source + target + (int32_t)l) % 6];
          bool in_place = (source + target) % 2 == 0;
          check_case("%d ranks, length %d, layouts %d and %d, dtype (%d, %d)", rank_counts[n],
                     (int)lengths[l], source, target, dtype.code, dtype.bits);
          one_reduce(&ranks, rank_counts[n], dtype, lengths[l], (rig_layout)source,
                     (rig_layout)target, in_place);
          ++calls;
        }
      }
    }
  }
  check_case("%s", "");
  CHECK_EQUAL(fdp_counters_read(FDP_VERB_REDUCE).calls - before.calls, calls);
  for (int32_t r = 0; r < RIG_RANKS; ++r) {
    CHECK_EQUAL(fdp_pool_read_stats(fdp_context_pool(ranks.context, ranks.devices[r])).lent_count,
                0);
  }
  rig_close(&ranks);
}

static void test_refuses(fdp_context *context) {
  rig_array target = rig_array_open(float32, 1, (int64_t[]){6}, RIG_ROWS, host);
  rig_array a = rig_array_open(float32, 1, (int64_t[]){6}, RIG_ROWS, host);
  rig_fill(&a, 0);
  fdp_view views[2] = {a.view, a.view}; /* sources may overlap */
#define REDUCE(count) fdp_reduce(context, views, NULL, (count), &target.view, NULL)
  CHECK_OK(REDUCE(2));
  CHECK_EQUAL(rig_load(float32, rig_address(&target.view, 5)), 2 * rig_value(0, 5));
  CHECK_FAILS(REDUCE(0), FDP_INVALID_ARGUMENT,
              "reduce: number of sources is 0, must be 1 to 64");
  views[1].shape[0] = 5;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT,
              "reduce: sources[1] has shape (5,), must be (6,) as target");
  views[1] = a.view;
  views[1].dtype = int32;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_TYPE,
              "reduce: sources[1] is int32, must be float32 as target");
  views[1] = target.view;
  CHECK_OK(REDUCE(2));
  views[1].data = (char *)target.view.data + 4;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT,
              "reduce: sources[1] overlaps target, must not unless it is the same view");
  views[1] = a.view;
  target.view.strides[0] = 0;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT,
              "reduce: target overlaps itself, must not, since it is written");
  target.view.strides[0] = 1;
  target.view.dtype = (fdp_dtype){FDP_CODE_FLOAT, 8, 4};
  CHECK_FAILS(REDUCE(2), FDP_INVALID_TYPE,
              "reduce: target is dtype(2,8,4), must be a dtype that can be summed");
  target.view.dtype = float32;
  fdp_fault_arm(FDP_FAULT_REDUCE, 1);
  CHECK_FAILS(REDUCE(2), FDP_FAULT_INJECTED, "reduce: this call was told to fail");
  CHECK_OK(REDUCE(2));
  rig_array_close(&target);
  rig_array_close(&a);
}

void test_reduce(void) {
  for (int32_t means = 0; means < RIG_MEANS_COUNT; ++means) test_products((rig_means)means);
  fdp_context *context = NULL;
  CHECK_OK(fdp_context_open(&context));
  test_refuses(context);
  fdp_context_close(context);
}
