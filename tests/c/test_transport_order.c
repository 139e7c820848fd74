/* Stream order of the transports between GPUs, on the simulated backend: as test_order.c, over
 * `peer`, `host` and `nccl`, with devices listed several times, and with buckets large enough for
 * shards and chunks (the Makefile shrinks those limits). */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/broadcast.h"
#include "../../csrc/bucket.h"
#include "../../csrc/gather.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "check.h"
#include "fake_gpu.h"
#include "rig.h"
#include "sim.h"

enum {
  MAX_RANKS = 7,
  SLOTS = 3,
  ROWS = 84, /* divides by every number of ranks */
  CALLERS = 2,
  ROUNDS = 6 /* more than buffers that a pool keeps in flight */
};

/* Which device each rank lies on; home is device 0. */
typedef struct map {
  int32_t rank_count;
  int32_t devices[MAX_RANKS];
} map;

static const map maps[] = {{2, {0, 1}},       {3, {0, 1, 2}},           {4, {2, 1, 0, 1}},
                           {3, {1, 1, 1}},    {7, {0, 1, 2, 3, 4, 5, 6}}, {4, {3, 1, 2, 1}},
                           {4, {0, 0, 1, 1}}, {2, {0, 0}}};

typedef enum scene_verb {
  SCATTER,
  GATHER,
  BROADCAST,
  REDUCE,
  BUCKET_BROADCAST,
  BUCKET_REDUCE,
  LONE_BROADCAST, /* a bucket of one tensor */
  LONE_REDUCE,
  VERB_COUNT
} scene_verb;

static bool whole_is_source(scene_verb verb) {
  return verb == SCATTER || verb == BROADCAST || verb == BUCKET_BROADCAST || verb == LONE_BROADCAST;
}

static int32_t slots_of(scene_verb verb) { return verb >= LONE_BROADCAST ? 1 : SLOTS; }
static int64_t slot_rows(int32_t slot) { return 21 * (SLOTS - slot); } /* the largest first */

/* Home has tensors `whole`, each rank has `parts`; of a bucket verb one side is a flat. */
typedef struct caller {
  fdp_stream *home;
  fdp_stream *streams[MAX_RANKS];
  rig_array whole[SLOTS];
  rig_array parts[MAX_RANKS][SLOTS];
} caller;

/* Two callers take turns, so that they share scratch and lanes but no streams. */
typedef struct scene {
  sim *world;
  fdp_context *context;
  const map *where;
  fdp_bucket *bucket;
  caller callers[CALLERS];
  int32_t slot_count; /* of the bucket */
  int32_t whole_count;
  int32_t part_count;
  int32_t first_wait; /* the pairs' checks made those before */
} scene;

static fdp_device_id gpu(int32_t ordinal) { return (fdp_device_id){FDP_DEVICE_CUDA, ordinal}; }

/* `count` tensors; of one, the leading dimension is as given. */
static int32_t open_side(rig_array *arrays, const scene *made, bool is_bucket, bool is_flat,
                         int64_t rows, rig_layout layout, fdp_device_id device) {
  int64_t shape[] = {rows, 2};
  if (!is_bucket) {
    arrays[0] = rig_array_open(float32, 2, shape, layout, device);
    return 1;
  }
  if (is_flat) {
    shape[0] = fdp_bucket_size_bytes(made->bucket) / 4;
    arrays[0] = rig_array_open(float32, 1, shape, RIG_ROWS, device);
    return 1;
  }
  for (int32_t k = 0; k < made->slot_count; ++k) {
    shape[0] = slot_rows(k);
    arrays[k] = rig_array_open(float32, 2, shape, layout, device);
  }
  return made->slot_count;
}

static void open_bucket(scene *made) {
  fdp_view prototypes[SLOTS];
  for (int32_t k = 0; k < made->slot_count; ++k) {
    prototypes[k] = (fdp_view){.device = gpu(0), .dtype = float32, .ndim = 2,
                               .shape = {slot_rows(k), 2}, .strides = {2, 1}};
  }
  CHECK_OK(fdp_bucket_open(prototypes, NULL, made->slot_count, &made->bucket));
}

static void caller_open(scene *made, caller *one, scene_verb verb, rig_layout layout) {
  const map *where = made->where;
  bool is_bucket = verb >= BUCKET_BROADCAST;
  bool is_cut = verb == SCATTER || verb == GATHER;
  one->home = sim_stream(made->world);
  made->whole_count = open_side(one->whole, made, is_bucket, !whole_is_source(verb), ROWS, layout,
                                gpu(0));
  for (int32_t r = 0; r < where->rank_count; ++r) {
    one->streams[r] = sim_stream(made->world);
    made->part_count = open_side(one->parts[r], made, is_bucket, whole_is_source(verb),
                                 is_cut ? ROWS / where->rank_count : ROWS, layout,
                                 gpu(where->devices[r]));
  }
}

static scene scene_open(scene_verb verb, const char *transport, const map *where,
                        rig_layout layout, uint64_t seed) {
  scene made = {.world = sim_open(seed), .where = where, .slot_count = slots_of(verb)};
  fdp_device_id others[MAX_RANKS];
  char reason[200];
  const char *name = NULL;
  setenv("FASTDP_TRANSPORT", transport, 1);
  setenv("FASTDP_NCCL", FAKE_NCCL_PATH, 1);
  CHECK_OK(fdp_context_open(&made.context));
  unsetenv("FASTDP_TRANSPORT");
  for (int32_t d = 0; d < MAX_RANKS; ++d) {
    fdp_device *device = sim_device(made.world, FDP_DEVICE_CUDA, d);
    fake_gpu_wrap(device);
    CHECK_OK(fdp_context_adopt(made.context, device));
  }
  open_bucket(&made);
  for (int32_t i = 0; i < CALLERS; ++i) caller_open(&made, &made.callers[i], verb, layout);
  for (int32_t r = 0; r < where->rank_count; ++r) others[r] = gpu(where->devices[r]);
  CHECK_OK(fdp_context_transport(made.context, NULL, gpu(0), others, where->rank_count, &name,
                                 reason, sizeof reason));
  made.first_wait = sim_wait_count(made.world);
  return made;
}

static void scene_close(scene *made) {
  fdp_bucket_close(made->bucket);
  fdp_context_close(made->context);
  fake_gpu_finish();
  sim_close(made->world);
  for (int32_t i = 0; i < CALLERS; ++i) {
    caller *one = &made->callers[i];
    for (int32_t k = 0; k < made->whole_count; ++k) rig_array_close(&one->whole[k]);
    for (int32_t r = 0; r < made->where->rank_count; ++r) {
      for (int32_t k = 0; k < made->part_count; ++k) rig_array_close(&one->parts[r][k]);
    }
  }
}

static fdp_status call(const scene *made, const caller *one, scene_verb verb) {
  fdp_context *context = made->context;
  fdp_stream *home = one->home, *const *streams = one->streams;
  fdp_view whole[SLOTS], firsts[MAX_RANKS];
  const fdp_view *gradients[MAX_RANKS * SLOTS];
  int32_t count = made->where->rank_count;
  for (int32_t k = 0; k < made->whole_count; ++k) whole[k] = one->whole[k].view;
  for (int32_t r = 0; r < count; ++r) {
    firsts[r] = one->parts[r][0].view;
    for (int32_t k = 0; k < made->part_count; ++k) {
      gradients[r * made->slot_count + k] = &one->parts[r][k].view;
    }
  }
  switch (verb) {
    case SCATTER: return fdp_scatter(context, whole, home, firsts, streams, count, 0);
    case GATHER: return fdp_gather(context, firsts, streams, count, whole, home, 0);
    case BROADCAST: return fdp_broadcast(context, whole, home, firsts, streams, count);
    case REDUCE: return fdp_reduce(context, firsts, streams, count, whole, home);
    case BUCKET_BROADCAST:
    case LONE_BROADCAST:
      return fdp_bucket_broadcast(context, made->bucket, whole, home, firsts, streams, count);
    default:
      return fdp_bucket_reduce(context, made->bucket, gradients, streams, count, whole, home);
  }
}

static void write_whole(const scene *made, caller *one, unsigned char value) {
  for (int32_t k = 0; k < made->whole_count; ++k) {
    sim_write(one->home, &one->whole[k].view, value);
  }
}

static void write_parts(const scene *made, caller *one, unsigned char value) {
  for (int32_t r = 0; r < made->where->rank_count; ++r) {
    for (int32_t k = 0; k < made->part_count; ++k) {
      sim_write(one->streams[r], &one->parts[r][k].view, value);
    }
  }
}

/* The owners write the sources before the call and spoil them after it, and read the targets, or
 * spoil them too; all on their own streams. */
static void play(scene *made, scene_verb verb, bool spoils_targets) {
  for (unsigned char round = 1; round <= ROUNDS; ++round) {
    caller *one = &made->callers[round % CALLERS];
    if (whole_is_source(verb)) {
      write_whole(made, one, round);
      CHECK_OK(call(made, one, verb));
      write_whole(made, one, 0);
      for (int32_t r = 0; r < made->where->rank_count; ++r) {
        sim_read(one->streams[r], &one->parts[r][0].view);
        if (spoils_targets) sim_write(one->streams[r], &one->parts[r][0].view, 0);
      }
    } else {
      write_parts(made, one, round);
      CHECK_OK(call(made, one, verb));
      write_parts(made, one, 0);
      sim_read(one->home, &one->whole[0].view);
      if (spoils_targets) sim_write(one->home, &one->whole[0].view, 0);
    }
  }
  sim_run(made->world);
}

/* Every element is the number whose bytes are all ROUNDS, `times` times. */
static bool has_sum(const fdp_view *view, int32_t times) {
  float one, sum = 0;
  memset(&one, ROUNDS, sizeof one);
  for (int32_t i = 0; i < times; ++i) sum += one;
  int64_t count = fdp_view_count_elems(view);
  for (int64_t i = 0; i < count; ++i) {
    if (memcmp(rig_address(view, i), &sum, sizeof sum) != 0) return false;
  }
  return true;
}

static void check_values(const scene *made, scene_verb verb) {
  const caller *last = &made->callers[ROUNDS % CALLERS];
  int32_t ranks = made->where->rank_count;
  if (verb == GATHER) CHECK(has_sum(&last->whole[0].view, 1));
  if (verb == REDUCE) CHECK(has_sum(&last->whole[0].view, ranks));
  for (int32_t r = 0; r < ranks && (verb == SCATTER || verb == BROADCAST); ++r) {
    CHECK(has_sum(&last->parts[r][0].view, 1));
  }
  bool is_bucket = verb >= BUCKET_BROADCAST;
  for (int32_t k = 0; k < made->slot_count && is_bucket && !whole_is_source(verb); ++k) {
    fdp_view slot = fdp_bucket_slot(made->bucket, k, last->whole[0].view.data, gpu(0));
    CHECK(has_sum(&slot, ranks));
  }
  for (int32_t r = 0; r < ranks && is_bucket && whole_is_source(verb); ++r) {
    for (int32_t k = 0; k < made->slot_count; ++k) {
      fdp_view slot = fdp_bucket_slot(made->bucket, k, last->parts[r][0].view.data, gpu(0));
      CHECK(has_sum(&slot, 1));
    }
  }
}

static const char *const transports[] = {"peer", "host", "nccl"};

static void test_no_races(void) {
  static const rig_layout layouts[] = {RIG_ROWS, RIG_GAPS, RIG_SHIFTED};
  for (int32_t number = 0; number < VERB_COUNT * 3 * 8 * 3; ++number) {
    scene_verb verb = (scene_verb)(number % VERB_COUNT);
    const char *transport = transports[number / VERB_COUNT % 3];
    const map *where = &maps[number / VERB_COUNT / 3 % 8];
    rig_layout layout = layouts[number / VERB_COUNT / 24];
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      check_case("%s, verb %d, map %d, layout %d, seed %d", transport, (int)verb,
                 (int)(where - maps), (int)layout, (int)seed);
      scene made = scene_open(verb, transport, where, layout, seed);
      play(&made, verb, false);
      CHECK_EQUAL(sim_race_count(made.world), 0);
      check_values(&made, verb);
      scene_close(&made);
    }
  }
  check_case("%s", "");
}

/* Counts the waits that make no race when they are left out. */
static int32_t count_idle_waits(scene_verb verb, const char *transport, const map *where,
                                rig_layout layout) {
  scene made = scene_open(verb, transport, where, layout, 1);
  play(&made, verb, true);
  CHECK_EQUAL(sim_race_count(made.world), 0);
  int32_t wait_count = sim_wait_count(made.world) - made.first_wait;
  scene_close(&made);
  CHECK(wait_count >= where->rank_count * ROUNDS);
  int32_t idle_count = 0;
  for (int32_t nth = 1; nth <= wait_count; ++nth) {
    made = scene_open(verb, transport, where, layout, 1);
    sim_leave_out_wait(made.world, made.first_wait + nth);
    play(&made, verb, true);
    idle_count += sim_race_count(made.world) == 0;
    scene_close(&made);
  }
  return idle_count;
}

/* maps[2] has two leads, a target that follows one of them, and one on home's device. Idle are:
 * - peer's bucket broadcasts: in the last three rounds, the hub's two waits for the reads of
 *   shards, which matter to whoever takes that scratch next; and in as many rounds, where it is
 *   taken, the two takers' waits for it, as they have waited for the hub since.
 * - host's sums: home takes scratch for three ranks, all of which the other caller's home gave back
 *   at once: two of the three waits, in every round but the first. */
static void test_left_out_waits(void) {
  static const int32_t idle_waits[3][VERB_COUNT] = {
      {[BUCKET_BROADCAST] = 3 * 2 + 3 * 2, [LONE_BROADCAST] = 3 * 2 + 3 * 2},
      {[REDUCE] = 2 * (ROUNDS - 1),
       [BUCKET_REDUCE] = 2 * (ROUNDS - 1),
       [LONE_REDUCE] = 2 * (ROUNDS - 1)},
  };
  for (int32_t t = 0; t < 3; ++t) {
    for (int32_t verb = 0; verb < VERB_COUNT; ++verb) {
      check_case("%s, verb %d", transports[t], verb);
      CHECK_EQUAL(count_idle_waits((scene_verb)verb, transports[t], &maps[2], RIG_ROWS),
                  idle_waits[t][verb]);
    }
  }
  /* Two devices, whose buckets go in chunks. Gradients are read in place or, of a lone tensor,
   * fetched; those off the alignment are packed. */
  for (int32_t verb = 0; verb < VERB_COUNT; ++verb) {
    check_case("peer in chunks, verb %d", verb);
    CHECK_EQUAL(count_idle_waits((scene_verb)verb, "peer", &maps[0], RIG_ROWS), 0);
    CHECK_EQUAL(count_idle_waits((scene_verb)verb, "peer", &maps[0], RIG_SHIFTED), 0);
  }
  check_case("%s", "");
}

void test_transport_order(void) {
  test_no_races();
  test_left_out_waits();
}
