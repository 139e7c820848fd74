/* The simulated backend itself: each kind of what it reports is provoked, once with what is missing
 * and once without, under every policy; and a seed is one order. */
#include <string.h>

#include "check.h"
#include "rig.h"
#include "sim.h"

enum { BYTES = 64 };

typedef struct scene {
  sim *world;
  fdp_device *devices[2];
  fdp_stream *streams[2];
  void *memory; /* of the first device */
} scene;

static const fdp_device_ops *ops_of(const scene *made) { return made->devices[0]->ops; }

static scene scene_open(sim_policy policy) {
  scene made = {.world = sim_open(5)};
  for (int32_t d = 0; d < 2; ++d) {
    made.devices[d] = sim_device(made.world, FDP_DEVICE_CUDA, d);
    CHECK_OK(ops_of(&made)->stream_open(made.devices[d], &made.streams[d]));
  }
  CHECK_OK(ops_of(&made)->memory_take(made.devices[0], BYTES, &made.memory));
  sim_set_policy(made.world, policy, 11);
  return made;
}

static void let_in(const scene *made) {
  CHECK_OK(ops_of(made)->peer_reach(made->devices[1], made->devices[0]));
}

/* Checks how many reports there were, and the beginning of the first. */
static void scene_close(scene *made, bool is_wrong, const char *text) {
  CHECK_EQUAL(sim_race_count(made->world) > 0, is_wrong);
  if (is_wrong) CHECK(strstr(sim_first_report(made->world), text) != NULL);
  for (int32_t d = 0; d < 2; ++d) {
    if (made->streams[d]) ops_of(made)->stream_close(made->devices[d], made->streams[d]);
    if (d == 0 && made->memory) ops_of(made)->memory_drop(made->devices[0], made->memory);
  }
  for (int32_t d = 0; d < 2; ++d) made->devices[d]->ops->close(made->devices[d]);
  if (!is_wrong) CHECK_EQUAL(sim_race_count(made->world), 0);
  CHECK_EQUAL(sim_open_count(made->world), 0);
  sim_close(made->world);
}

static fdp_view view_of(const scene *made, int64_t begin, int64_t count) {
  return (fdp_view){.data = (char *)made->memory + begin, .device = made->devices[0]->id,
                    .dtype = uint8, .ndim = 1, .shape = {count}, .strides = {1}};
}

static void order(const scene *made, int32_t first, int32_t then) {
  fdp_event *event = NULL;
  CHECK_OK(ops_of(made)->event_open(made->devices[first], &event));
  CHECK_OK(ops_of(made)->event_record(made->devices[first], event, made->streams[first]));
  CHECK_OK(ops_of(made)->stream_wait(made->devices[then], made->streams[then], event));
  ops_of(made)->event_close(made->devices[first], event);
}

static fdp_status copy_by(const scene *made, int32_t d, int64_t to, int64_t from, int64_t count) {
  char *memory = made->memory;
  return ops_of(made)->copy(made->devices[d], made->streams[d], memory + to, memory + from, count);
}

/* The second device writes bytes that the first one reads. */
static void test_conflict(sim_policy policy, bool has_wait) {
  scene made = scene_open(policy);
  fdp_view bytes = view_of(&made, 0, 8);
  let_in(&made);
  CHECK_OK(copy_by(&made, 0, 16, 0, 8));
  if (has_wait) order(&made, 0, 1);
  sim_write(made.streams[1], &bytes, 1);
  sim_run(made.world);
  scene_close(&made, !has_wait, "no order between two accesses: copy");
}

/* Two that read, or whose bytes are neighbours, need no order. */
static void test_no_conflict(sim_policy policy) {
  scene made = scene_open(policy);
  fdp_view bytes = view_of(&made, 0, 8), next = view_of(&made, 8, 8);
  let_in(&made);
  sim_read(made.streams[0], &bytes);
  sim_read(made.streams[1], &bytes);
  sim_write(made.streams[1], &next, 1);
  sim_run(made.world);
  scene_close(&made, false, "");
}

/* A wait keeps the record that it saw: what comes after that is not waited for. */
static void test_record(sim_policy policy) {
  scene made = scene_open(policy);
  fdp_view bytes = view_of(&made, 0, 8);
  let_in(&made);
  order(&made, 0, 1);
  sim_write(made.streams[0], &bytes, 1);
  sim_read(made.streams[1], &bytes);
  sim_run(made.world);
  scene_close(&made, true, "no order");
}

/* The host reads after it has waited, or has not. */
static void test_host_read(sim_policy policy, bool has_wait) {
  scene made = scene_open(policy);
  fdp_view bytes = view_of(&made, 0, 8);
  fdp_event *event = NULL;
  sim_write(made.streams[0], &bytes, 7);
  CHECK_OK(ops_of(&made)->event_open(made.devices[0], &event));
  CHECK_OK(ops_of(&made)->event_record(made.devices[0], event, made.streams[0]));
  if (has_wait) CHECK_OK(ops_of(&made)->event_synchronize(made.devices[0], event, 1000, NULL));
  sim_host_access(made.world, bytes.data, 8, false);
  if (has_wait) CHECK_EQUAL(*(char *)bytes.data, 7);
  ops_of(&made)->event_close(made.devices[0], event);
  sim_run(made.world);
  scene_close(&made, !has_wait, "the host's read");
}

/* Memory that is dropped while somebody works on it, and after that. */
static void test_drop(sim_policy policy, bool has_wait) {
  scene made = scene_open(policy);
  fdp_view bytes = view_of(&made, 0, 8);
  sim_write(made.streams[0], &bytes, 7);
  if (has_wait) sim_run(made.world);
  ops_of(&made)->memory_drop(made.devices[0], made.memory);
  CHECK_EQUAL(*(unsigned char *)made.memory, 0xFF);
  void *again = NULL;
  CHECK_OK(ops_of(&made)->memory_take(made.devices[0], BYTES, &again));
  CHECK(again == made.memory);
  sim_run(made.world);
  scene_close(&made, !has_wait, "memory_drop");
}

static void test_blocks(void) {
  scene made = scene_open(SIM_LATE);
  CHECK_OK(copy_by(&made, 0, BYTES - 8, 0, 9));
  scene_close(&made, true, "in no block of memory");
  made = scene_open(SIM_LATE);
  CHECK_OK(copy_by(&made, 1, 8, 0, 8));
  scene_close(&made, true, "was not let into");
  made = scene_open(SIM_LATE);
  void *dropped = made.memory;
  ops_of(&made)->memory_drop(made.devices[0], dropped);
  CHECK_OK(copy_by(&made, 0, 8, 0, 8));
  made.memory = NULL;
  scene_close(&made, true, "that was given back");
  made = scene_open(SIM_LATE);
  made.streams[1] = NULL; /* is left open */
  made.devices[1]->ops->close(made.devices[1]);
  CHECK(strstr(sim_first_report(made.world), "closed with 1 streams") != NULL);
  made.devices[1] = sim_device(made.world, FDP_DEVICE_CUDA, 1);
  scene_close(&made, true, "device 1");
}

/* On the default stream of a GPU nothing is copied from another one or to it, whatever memory that
 * has. Within one, of host memory and by a kernel it is. */
static void test_default_stream(void) {
  static char lent[BYTES], others[BYTES], more[BYTES];
  for (int32_t number = 0; number < 8; ++number) {
    scene made = scene_open(SIM_LATE);
    fdp_device *device = made.devices[number % 2];
    fdp_segment segment = {made.memory, 0, 8};
    check_case("case %d on a default stream", number);
    let_in(&made);
    sim_own(made.devices[0], lent, BYTES);
    switch (number / 2) {
      case 0: CHECK_OK(ops_of(&made)->copy(device, NULL, others, made.memory, 8)); break;
      case 1: CHECK_OK(ops_of(&made)->copy(device, NULL, lent, others, 8)); break;
      case 2: CHECK_OK(ops_of(&made)->copy(device, NULL, more, others, 8)); break;
      default: CHECK_OK(ops_of(&made)->pack(device, NULL, others, &segment, 1)); break;
    }
    sim_run(made.world);
    bool is_wrong = number == 1 || number == 3;
    scene_close(&made, is_wrong, "between devices 1 and 0 on a default stream");
  }
  check_case("%s", "");
}

/* Two sets of communicators on one device, in turn or not. */
static void test_turns(bool has_wait) {
  scene made = scene_open(SIM_LATE);
  int sets[2];
  fdp_stream *other = NULL;
  CHECK_OK(ops_of(&made)->stream_open(made.devices[0], &other));
  for (int32_t i = 0; i < 2; ++i) {
    fdp_stream *stream = i == 0 ? made.streams[0] : other;
    fdp_view bytes = view_of(&made, 8 * i, 8);
    fdp_event *event = NULL;
    sim_turn_begin(made.world, made.devices[0], &stream, 1, &sets[i]);
    sim_write(stream, &bytes, 1);
    sim_turn_end(made.world, made.devices[0], &stream, 1, &sets[i]);
    CHECK_OK(ops_of(&made)->event_open(made.devices[0], &event));
    CHECK_OK(ops_of(&made)->event_record(made.devices[0], event, stream));
    if (has_wait) CHECK_OK(ops_of(&made)->stream_wait(made.devices[0], other, event));
    ops_of(&made)->event_close(made.devices[0], event);
  }
  ops_of(&made)->stream_close(made.devices[0], other);
  scene_close(&made, !has_wait, "two sets of communicators");
}

/* What was enqueued and run, in its order, as a number. */
static uint64_t trace_of(sim_policy policy, uint64_t seed) {
  scene made = scene_open(policy);
  let_in(&made);
  sim_set_policy(made.world, policy, seed);
  for (int32_t i = 0; i < 20; ++i) {
    fdp_view bytes = view_of(&made, i % 2 * 8, 8);
    sim_write(made.streams[i % 2], &bytes, 1);
  }
  sim_run(made.world);
  uint64_t trace = sim_trace_hash(made.world);
  scene_close(&made, false, "");
  return trace;
}

static void test_seeds(sim_policy policy) {
  int32_t different = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK_EQUAL(trace_of(policy, seed), trace_of(policy, seed));
    different += trace_of(policy, seed) != trace_of(policy, seed + 20);
  }
  if (policy == SIM_RANDOM) CHECK(different > 10);
}

static void test_faults(void) {
  scene made = scene_open(SIM_LATE);
  fdp_event *event = NULL;
  sim_fail_call(made.world, 2);
  CHECK_OK(copy_by(&made, 0, 8, 0, 8));
  CHECK_FAILS(ops_of(&made)->event_open(made.devices[0], &event), FDP_DEVICE_ERROR, NULL);
  CHECK(sim_call_failed(made.world));
  CHECK_OK(ops_of(&made)->event_open(made.devices[0], &event));
  ops_of(&made)->event_close(made.devices[0], event);
  void *memory = NULL;
  sim_fill_device(made.devices[0]);
  CHECK_FAILS(ops_of(&made)->memory_take(made.devices[0], 8, &memory), FDP_OUT_OF_MEMORY, NULL);
  sim_run(made.world);
  scene_close(&made, false, "");
}

static bool has_passed(const scene *made, int32_t d, fdp_event *event) {
  bool passed = false;
  CHECK_OK(ops_of(made)->event_query(made->devices[d], event, &passed));
  return passed;
}

/* A device that never finishes, or does after a while; whoever waits for it does not either. */
static void test_stall(sim_policy policy, bool stalls) {
  scene made = scene_open(policy);
  fdp_event *events[2] = {NULL, NULL};
  let_in(&made);
  for (int32_t d = 0; d < 2; ++d) CHECK_OK(ops_of(&made)->event_open(made.devices[d], &events[d]));
  sim_stall_call(made.world, stalls ? 1 : 0);
  CHECK_OK(copy_by(&made, 0, 16, 0, 8));
  CHECK_EQUAL(sim_is_stalled(made.world), stalls);
  CHECK_OK(ops_of(&made)->event_record(made.devices[1], events[1], made.streams[1]));
  CHECK_OK(ops_of(&made)->event_synchronize(made.devices[1], events[1], 70, NULL));
  order(&made, 0, 1);
  CHECK_OK(copy_by(&made, 1, 32, 16, 8));
  for (int32_t d = 0; d < 2; ++d) {
    CHECK_OK(ops_of(&made)->event_record(made.devices[d], events[d], made.streams[d]));
  }
  if (stalls) {
    sim_run(made.world);
    for (int32_t d = 0; d < 2; ++d) CHECK(!has_passed(&made, d, events[d]));
    CHECK_FAILS(ops_of(&made)->event_synchronize(made.devices[1], events[1], 70, NULL),
                FDP_TIMED_OUT, "sim: device 1: event_synchronize: not done within 70 ms");
    CHECK_EQUAL(sim_lost_ms(made.world), 70);
    sim_resume(made.world);
  }
  CHECK_EQUAL(sim_is_stalled(made.world), false);
  for (int32_t d = 0; d < 2; ++d) {
    CHECK_OK(ops_of(&made)->event_synchronize(made.devices[d], events[d], 70, NULL));
    CHECK(has_passed(&made, d, events[d]));
    ops_of(&made)->event_close(made.devices[d], events[d]);
  }
  CHECK_EQUAL(sim_lost_ms(made.world), stalls ? 70 : 0);
  scene_close(&made, false, "");
}

void test_sim(void) {
  for (int32_t i = 0; i < SIM_POLICY_COUNT; ++i) {
    sim_policy policy = (sim_policy)i;
    check_case("%s", sim_policy_name(policy));
    for (int32_t has_wait = 0; has_wait < 2; ++has_wait) {
      test_conflict(policy, has_wait);
      test_host_read(policy, has_wait);
      test_drop(policy, has_wait);
    }
    test_no_conflict(policy);
    test_stall(policy, false);
    test_stall(policy, true);
    test_record(policy);
    test_seeds(policy);
  }
  check_case("%s", "");
  test_blocks();
  test_default_stream();
  test_turns(false);
  test_turns(true);
  test_faults();
}
