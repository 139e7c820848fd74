/* Stream order. On the simulated backend every verb runs between work of a user's that writes and
 * reads the same memory; no pair of operations may be unordered, under any seed, and leaving out
 * any single wait must be found. On real threads, with a delayed stream, the results are right. */
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/broadcast.h"
#include "../../csrc/bucket.h"
#include "../../csrc/device_host.h"
#include "../../csrc/gather.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "check.h"
#include "host_work.h"
#include "rig.h"
#include "sim.h"

enum { RANKS = 3, LENGTH = 6 };

/* Rank r has a device, a stream and two arrays; the home has a stream of its own on rank 0's device
 * and one array, `whole`. */
typedef struct scene {
  sim *world;
  fdp_context *context;
  fdp_device_id ids[RANKS];
  fdp_stream *home;
  fdp_stream *streams[RANKS];
  rig_array whole;
  rig_array parts[RANKS];
} scene;

typedef enum scene_verb {
  SCENE_SCATTER,
  SCENE_GATHER,
  SCENE_BROADCAST,
  SCENE_REDUCE,
  SCENE_REDUCE_STAGED, /* sources and target whose layouts do not fit */
  SCENE_BUCKET_BROADCAST,
  SCENE_BUCKET_BROADCAST_STAGED,
  SCENE_BUCKET_REDUCE,
  SCENE_BUCKET_REDUCE_STAGED,
  SCENE_VERB_COUNT
} scene_verb;

static bool is_staged(scene_verb verb) {
  return verb == SCENE_REDUCE_STAGED || verb == SCENE_BUCKET_BROADCAST_STAGED ||
         verb == SCENE_BUCKET_REDUCE_STAGED;
}

static bool whole_is_source(scene_verb verb) {
  return verb == SCENE_SCATTER || verb == SCENE_BROADCAST || verb == SCENE_BUCKET_BROADCAST ||
         verb == SCENE_BUCKET_BROADCAST_STAGED;
}

static scene scene_open(scene_verb verb, uint64_t seed) {
  scene made = {.world = sim_open(seed)};
  CHECK_OK(fdp_context_open(&made.context));
  made.home = sim_stream(made.world);
  int64_t whole[] = {LENGTH, 2}, part[] = {LENGTH, 2};
  if (verb == SCENE_SCATTER || verb == SCENE_GATHER) part[0] = LENGTH / RANKS;
  bool source_is_whole = whole_is_source(verb);
  rig_layout odd = is_staged(verb) ? RIG_GAPS : RIG_ROWS;
  rig_layout whole_layout = source_is_whole || verb == SCENE_REDUCE_STAGED ? odd : RIG_ROWS;
  rig_layout part_layout = source_is_whole ? RIG_ROWS : odd;
  for (int32_t r = 0; r < RANKS; ++r) {
    fdp_device *device = sim_device(made.world, FDP_DEVICE_HOST, r + 1);
    made.ids[r] = device->id;
    CHECK_OK(fdp_context_adopt(made.context, device));
    made.streams[r] = sim_stream(made.world);
    bool is_flat = verb == SCENE_BUCKET_BROADCAST || verb == SCENE_BUCKET_BROADCAST_STAGED;
    made.parts[r] = rig_array_open(float32, is_flat ? 1 : 2, is_flat ? (int64_t[]){2 * LENGTH}
                                                                     : part, part_layout,
                                   made.ids[r]);
  }
  bool is_flat = verb == SCENE_BUCKET_REDUCE || verb == SCENE_BUCKET_REDUCE_STAGED;
  made.whole = rig_array_open(float32, is_flat ? 1 : 2, is_flat ? (int64_t[]){2 * LENGTH} : whole,
                              whole_layout, made.ids[0]);
  return made;
}

static void scene_close(scene *made) {
  fdp_context_close(made->context);
  sim_close(made->world);
  for (int32_t r = 0; r < RANKS; ++r) rig_array_close(&made->parts[r]);
  rig_array_close(&made->whole);
}

static fdp_status call(scene *made, scene_verb verb) {
  fdp_view views[RANKS];
  const fdp_view *gradients[RANKS];
  for (int32_t r = 0; r < RANKS; ++r) {
    views[r] = made->parts[r].view;
    gradients[r] = &views[r];
  }
  fdp_view *whole = &made->whole.view;
  fdp_bucket *bucket = NULL;
  fdp_view prototype = {.device = host, .dtype = float32, .ndim = 2, .shape = {LENGTH, 2},
                        .strides = {2, 1}};
  CHECK_OK(fdp_bucket_open(&prototype, NULL, 1, &bucket));
  fdp_status status = FDP_OK;
  switch (verb) {
    case SCENE_SCATTER:
      status = fdp_scatter(made->context, whole, made->home, views, made->streams, RANKS, 0);
      break;
    case SCENE_GATHER:
      status = fdp_gather(made->context, views, made->streams, RANKS, whole, made->home, 0);
      break;
    case SCENE_BROADCAST:
      status = fdp_broadcast(made->context, whole, made->home, views, made->streams, RANKS);
      break;
    case SCENE_BUCKET_BROADCAST:
    case SCENE_BUCKET_BROADCAST_STAGED:
      status = fdp_bucket_broadcast(made->context, bucket, whole, made->home, views, made->streams,
                                    RANKS);
      break;
    case SCENE_BUCKET_REDUCE:
    case SCENE_BUCKET_REDUCE_STAGED:
      status = fdp_bucket_reduce(made->context, bucket, gradients, made->streams, RANKS, whole,
                                 made->home);
      break;
    default:
      status = fdp_reduce(made->context, views, made->streams, RANKS, whole, made->home);
      break;
  }
  fdp_bucket_close(bucket);
  return status;
}

/* Each stream writes what it owns of the sources, the verb runs, each stream reads what it owns of
 * the targets and overwrites what it owns of the sources. Twice, so that scratch is used again. */
static void play(scene *made, scene_verb verb) {
  bool source_is_whole = whole_is_source(verb);
  for (unsigned char round = 1; round <= 2; ++round) {
    if (source_is_whole) {
      sim_write(made->home, &made->whole.view, round);
    } else {
      for (int32_t r = 0; r < RANKS; ++r) {
        sim_write(made->streams[r], &made->parts[r].view, round);
      }
    }
    CHECK_OK(call(made, verb));
    if (source_is_whole) {
      sim_write(made->home, &made->whole.view, 0);
      for (int32_t r = 0; r < RANKS; ++r) sim_read(made->streams[r], &made->parts[r].view);
    } else {
      sim_read(made->home, &made->whole.view);
      for (int32_t r = 0; r < RANKS; ++r) {
        sim_write(made->streams[r], &made->parts[r].view, 0);
      }
    }
  }
  sim_run(made->world);
}

static bool has_value(const fdp_view *view, unsigned char value) {
  unsigned char wanted[sizeof(float)];
  memset(wanted, value, sizeof wanted);
  int64_t count = fdp_view_count_elems(view);
  for (int64_t i = 0; i < count; ++i) {
    if (memcmp(rig_address(view, i), wanted, sizeof wanted) != 0) return false;
  }
  return true;
}

static void test_simulated(void) {
  for (int32_t number = 0; number < SCENE_VERB_COUNT; ++number) {
    scene_verb verb = (scene_verb)number;
    int32_t wait_count = 0;
    for (uint64_t seed = 1; seed <= 50; ++seed) {
      check_case("verb %d, seed %d", number, (int)seed);
      scene made = scene_open(verb, seed);
      play(&made, verb);
      CHECK_EQUAL(sim_race_count(made.world), 0);
      wait_count = sim_wait_count(made.world);
      for (int32_t r = 0; r < RANKS && whole_is_source(verb); ++r) {
        CHECK(has_value(&made.parts[r].view, 2));
      }
      if (verb == SCENE_GATHER) CHECK(has_value(&made.whole.view, 2));
      scene_close(&made);
    }
    CHECK(wait_count >= 2 * 2 * RANKS);
    int32_t found = 0;
    for (int32_t nth = 1; nth <= wait_count; ++nth) {
      check_case("verb %d without wait %d", number, nth);
      scene made = scene_open(verb, 1);
      sim_leave_out_wait(made.world, nth);
      play(&made, verb);
      found += sim_race_count(made.world) > 0;
      scene_close(&made);
    }
    check_case("verb %d", number);
    /* Since staged sources are read on their own stream, the sources' last wait for the readers
     * matters to the next call only, which the second round has not. */
    int32_t idle_waits = is_staged(verb) ? RANKS : 0;
    CHECK_EQUAL(found, wait_count - idle_waits);
  }
  check_case("%s", "");
}

/* Scratch that another stream gave back is waited for. */
static void test_pool_order(void) {
  for (int32_t left_out = 0; left_out <= 1; ++left_out) {
    sim *world = sim_open(3);
    fdp_device *device = sim_device(world, FDP_DEVICE_HOST, 1);
    fdp_stream *first = sim_stream(world), *second = sim_stream(world);
    fdp_pool *pool = NULL;
    fdp_buffer *buffer = NULL;
    CHECK_OK(fdp_pool_open(device, INT64_MAX, &pool));
    sim_leave_out_wait(world, left_out);
    for (int32_t i = 0; i < 2; ++i) {
      fdp_stream *stream = i == 0 ? first : second;
      CHECK_OK(fdp_pool_take(pool, 100, stream, &buffer));
      fdp_view view = {.data = buffer->data, .device = host, .dtype = uint8, .ndim = 1,
                       .shape = {100}, .strides = {1}};
      sim_write(stream, &view, 1);
      CHECK_OK(fdp_pool_give(pool, buffer, stream));
    }
    sim_run(world);
    CHECK_EQUAL(sim_race_count(world) > 0, left_out == 1);
    fdp_pool_close(pool);
    device->ops->close(device);
    sim_close(world);
  }
}

static fdp_status sleep_a_little(void *unused) {
  (void)unused;
  sleep_ms(3);
  return FDP_OK;
}

typedef struct setting {
  rig_array *array;
  int32_t rank;
} setting;

static fdp_status set_values(void *argument) {
  setting *wanted = argument;
  rig_fill(wanted->array, wanted->rank);
  return FDP_OK;
}

/* The source is written late on its stream and spoiled right after the call, on the same stream. */
static void test_delays(void) {
  rig ranks;
  rig_open(&ranks, RIG_THREADS);
  for (int32_t delayed = 0; delayed < RANKS; ++delayed) {
    int64_t shape[] = {5};
    rig_array source = rig_array_open(float32, 1, shape, RIG_ROWS, ranks.ids[0]);
    rig_array targets[RANKS];
    fdp_view views[RANKS];
    rig_array sum = rig_array_open(float32, 1, shape, RIG_ROWS, ranks.ids[0]);
    setting good = {&source, 1}, spoiled = {&source, 9}, spoiled_target = {&targets[2], 9};
    for (int32_t r = 0; r < RANKS; ++r) {
      targets[r] = rig_array_open(float32, 1, shape, RIG_ROWS, ranks.ids[r]);
      views[r] = targets[r].view;
    }
    fdp_device *device = ranks.devices[delayed];
    CHECK_OK(fdp_device_host_enqueue(device, ranks.streams[delayed], sleep_a_little, NULL));
    CHECK_OK(fdp_device_host_enqueue(ranks.devices[0], ranks.streams[0], set_values, &good));
    CHECK_OK(fdp_broadcast(ranks.context, &source.view, ranks.streams[0], views, ranks.streams,
                           RANKS));
    CHECK_OK(fdp_device_host_enqueue(ranks.devices[0], ranks.streams[0], set_values, &spoiled));
    CHECK_OK(fdp_device_host_enqueue(device, ranks.streams[delayed], sleep_a_little, NULL));
    CHECK_OK(fdp_reduce(ranks.context, views, ranks.streams, RANKS, &sum.view, ranks.streams[1]));
    CHECK_OK(fdp_device_host_enqueue(ranks.devices[2], ranks.streams[2], set_values,
                                     &spoiled_target));
    rig_finish(&ranks);
    for (int64_t i = 0; i < 5; ++i) {
      CHECK_EQUAL(rig_load(float32, rig_address(&sum.view, i)), RANKS * rig_value(1, i));
      CHECK_EQUAL(rig_load(float32, rig_address(&targets[2].view, i)), rig_value(9, i));
    }
    for (int32_t r = 0; r < RANKS; ++r) rig_array_close(&targets[r]);
    rig_array_close(&source);
    rig_array_close(&sum);
  }
  rig_close(&ranks);
}

/* A target whose stream is busy holds up nobody but itself and, afterwards, the source. */
static void test_targets_are_independent(void) {
  rig ranks;
  sem_t gate;
  fdp_event *event = NULL;
  bool passed = true;
  rig_open(&ranks, RIG_THREADS);
  sem_init(&gate, 0, 0);
  rig_array source = rig_array_open(float32, 1, (int64_t[]){4}, RIG_ROWS, ranks.ids[0]);
  rig_array targets[2];
  fdp_view views[2], flats[2];
  fdp_bucket *bucket = NULL;
  rig_fill(&source, 0);
  for (int32_t r = 0; r < 2; ++r) {
    targets[r] = rig_array_open(float32, 1, (int64_t[]){4}, RIG_ROWS, ranks.ids[r + 1]);
    views[r] = flats[r] = targets[r].view;
  }
  CHECK_OK(fdp_bucket_open(&source.view, NULL, 1, &bucket));
  fdp_device *home = ranks.devices[0], *busy = ranks.devices[1], *idle = ranks.devices[2];
  CHECK_OK(home->ops->event_open(home, &event));
  for (int32_t verb = 0; verb < 2; ++verb) {
    CHECK_OK(fdp_device_host_enqueue(busy, ranks.streams[1], wait_for_semaphore, &gate));
    if (verb == 0) {
      CHECK_OK(fdp_broadcast(ranks.context, &source.view, ranks.streams[0], views,
                             &ranks.streams[1], 2));
    } else {
      CHECK_OK(fdp_bucket_broadcast(ranks.context, bucket, &source.view, ranks.streams[0], flats,
                                    &ranks.streams[1], 2));
    }
    CHECK_OK(idle->ops->event_record(idle, event, ranks.streams[2]));
    CHECK_OK(idle->ops->event_synchronize(idle, event, 10000, NULL));
    CHECK_OK(home->ops->event_record(home, event, ranks.streams[0]));
    CHECK_OK(home->ops->event_query(home, event, &passed));
    CHECK(!passed);
    sem_post(&gate);
    rig_finish(&ranks);
  }
  home->ops->event_close(home, event);
  fdp_bucket_close(bucket);
  rig_close(&ranks);
  for (int32_t r = 0; r < 2; ++r) rig_array_close(&targets[r]);
  rig_array_close(&source);
  sem_destroy(&gate);
}

void test_order(void) {
  test_simulated();
  test_pool_order();
  test_delays();
  test_targets_are_independent();
}
