/* Steady state and shortage: no new memory after warm-up, and every failing allocation of every
 * verb is an error that leaves everything usable. */
#include <string.h>

#include "../../csrc/broadcast.h"
#include "../../csrc/bucket.h"
#include "../../csrc/fault.h"
#include "../../csrc/gather.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "check.h"
#include "rig.h"

enum { RANKS = 2, SLOTS = 12 };

typedef struct work {
  rig ranks;
  rig_array whole;      /* of gaps, so that reduce makes its sum aside */
  rig_array tensors[RANKS][SLOTS];
  rig_array flats[RANKS];
  fdp_bucket *bucket;
} work;

/* `layout` of the tensors: the slots are rows. */
static void work_open(work *made, rig_means means, rig_layout layout) {
  int64_t shape[] = {4, 3};
  fdp_view prototypes[SLOTS];
  rig_open(&made->ranks, means);
  made->whole = rig_array_open(float32, 2, shape, RIG_GAPS, made->ranks.ids[0]);
  for (int32_t r = 0; r < RANKS; ++r) {
    for (int32_t k = 0; k < SLOTS; ++k) {
      made->tensors[r][k] = rig_array_open(float32, 2, shape, layout, made->ranks.ids[r]);
      rig_fill(&made->tensors[r][k], r);
      prototypes[k] = made->whole.view;
    }
  }
  CHECK_OK(fdp_bucket_open(prototypes, NULL, SLOTS, &made->bucket));
  int64_t length = fdp_bucket_size_bytes(made->bucket) / 4;
  for (int32_t r = 0; r < RANKS; ++r) {
    made->flats[r] = rig_array_open(float32, 1, &length, RIG_ROWS, made->ranks.ids[r]);
  }
}

static void work_close(work *made) {
  rig_close(&made->ranks);
  for (int32_t r = 0; r < RANKS; ++r) {
    for (int32_t k = 0; k < SLOTS; ++k) rig_array_close(&made->tensors[r][k]);
    rig_array_close(&made->flats[r]);
  }
  rig_array_close(&made->whole);
  fdp_bucket_close(made->bucket);
}

enum { BUCKET_BROADCAST, BUCKET_REDUCE, REDUCE, BROADCAST, SCATTER, GATHER, VERB_COUNT };

static fdp_status call(work *made, int verb) {
  fdp_stream *const *streams = made->ranks.streams;
  fdp_context *context = made->ranks.context;
  fdp_view views[SLOTS], ranks[RANKS], flats[RANKS];
  const fdp_view *gradients[RANKS * SLOTS];
  for (int32_t k = 0; k < SLOTS; ++k) views[k] = made->tensors[0][k].view;
  for (int32_t r = 0; r < RANKS; ++r) {
    for (int32_t k = 0; k < SLOTS; ++k) gradients[r * SLOTS + k] = &made->tensors[r][k].view;
    ranks[r] = made->tensors[r][0].view;
    flats[r] = made->flats[r].view;
  }
  switch (verb) {
    case BUCKET_BROADCAST:
      return fdp_bucket_broadcast(context, made->bucket, views, streams[0], flats, streams, RANKS);
    case BUCKET_REDUCE:
      return fdp_bucket_reduce(context, made->bucket, gradients, streams, RANKS, &flats[0],
                               streams[0]);
    case REDUCE:
      return fdp_reduce(context, ranks, streams, RANKS, &made->whole.view, streams[0]);
    case BROADCAST:
      return fdp_broadcast(context, &made->whole.view, streams[0], ranks, streams, RANKS);
    case SCATTER:
      for (int32_t r = 0; r < RANKS; ++r) ranks[r] = fdp_view_narrow(&ranks[r], 0, 0, 2);
      return fdp_scatter(context, &made->whole.view, streams[0], ranks, streams, RANKS, 0);
    default:
      for (int32_t r = 0; r < RANKS; ++r) ranks[r] = fdp_view_narrow(&ranks[r], 0, 0, 2);
      return fdp_gather(context, ranks, streams, RANKS, &made->whole.view, streams[0], 0);
  }
}

/* On the host's own stream a warm verb takes at most one block of memory, and none of the
 * device. */
static void test_steady_state(void) {
  for (int layout = 0; layout < 2; ++layout) {
    work made;
    work_open(&made, RIG_AT_ONCE, layout == 0 ? RIG_ROWS : RIG_NEGATIVE);
    fdp_pool *pool = fdp_context_pool(made.ranks.context, made.ranks.devices[0]);
    for (int verb = 0; verb < VERB_COUNT; ++verb) {
      check_case("verb %d, layout %d", verb, layout);
      CHECK_OK(call(&made, verb));
      int64_t takes = fdp_pool_read_stats(pool).device_takes;
      int64_t allocations = check_allocation_count();
      CHECK_OK(call(&made, verb));
      allocations = check_allocation_count() - allocations;
      CHECK_EQUAL(fdp_pool_read_stats(pool).device_takes, takes);
      if (layout == 0) CHECK(allocations <= 1);
      bool fits = FDP_PLAN_INLINE_COPIES >= RANKS; /* not in a build that shrinks the limits */
      if (layout == 0 && verb >= REDUCE && fits) CHECK_EQUAL(allocations, 0);
    }
    work_close(&made);
  }
  check_case("%s", "");
}

/* The n-th allocation fails, for every n until the verb no longer gets that far. */
static void test_shortage(rig_means means) {
  for (int verb = 0; verb < VERB_COUNT; ++verb) {
    for (int64_t nth = 1;; ++nth) {
      check_case("verb %d, allocation %d", verb, (int)nth);
      work made; /* a new context, so that its first use is tried too */
      work_open(&made, means, RIG_NEGATIVE);
      check_fail_allocation(nth);
      fdp_status status = call(&made, verb);
      bool reached = check_allocation_failed();
      if (reached) CHECK_FAILS(status, FDP_OUT_OF_MEMORY, NULL);
      if (!reached) CHECK_OK(status);
      CHECK_OK(call(&made, verb));
      rig_finish(&made.ranks);
      for (int32_t r = 0; r < RANKS; ++r) {
        fdp_pool *pool = fdp_context_pool(made.ranks.context, made.ranks.devices[r]);
        CHECK_EQUAL(fdp_pool_read_stats(pool).lent_count, 0);
      }
      work_close(&made);
      if (!reached) break;
    }
  }
  check_case("%s", "");
}

/* The same for memory of the device, by the fault point that tests from Python use. */
static void test_device_shortage(void) {
  for (int verb = 0; verb <= REDUCE; ++verb) {
    work made;
    work_open(&made, RIG_AT_ONCE, RIG_NEGATIVE);
    check_case("verb %d", verb);
    fdp_fault_arm(FDP_FAULT_MEMORY_TAKE, 1);
    CHECK_FAILS(call(&made, verb), FDP_FAULT_INJECTED, "memory_take: this call was told to fail");
    CHECK_OK(call(&made, verb));
    fdp_fault_arm(FDP_FAULT_MEMORY_TAKE, 1);
    CHECK_OK(call(&made, verb)); /* warm: takes none */
    fdp_fault_arm(FDP_FAULT_MEMORY_TAKE, 0);
    work_close(&made);
  }
  check_case("%s", "");
}

void test_memory(void) {
  test_steady_state();
  for (int32_t means = 0; means < RIG_MEANS_COUNT; ++means) test_shortage((rig_means)means);
  test_device_shortage();
}
