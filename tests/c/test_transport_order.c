/* Stream order of the transports between GPUs, on the simulated backend: as test_order.c, over
 * `peer`, `host` and `nccl`, with devices listed several times. */
#include "check.h"
#include "order_scene.h"

static const char *const transports[] = {"peer", "host", "nccl"};
static const order_map *const one_device = &order_maps[7];

static void test_no_races(void) {
  static const rig_layout layouts[] = {RIG_ROWS, RIG_GAPS, RIG_SHIFTED};
  for (int32_t number = 0; number < VERB_COUNT * 3 * 8 * 3; ++number) {
    order_verb verb = (order_verb)(number % VERB_COUNT);
    const char *transport = transports[number / VERB_COUNT % 3];
    const order_map *where = &order_maps[number / VERB_COUNT / 3 % 8];
    rig_layout layout = layouts[number / VERB_COUNT / 24];
    for (int32_t use = 0; use < STREAM_USES; ++use) {
      check_case("%s, verb %d, map %d, layout %d, streams %d", transport, (int)verb,
                 (int)(where - order_maps), (int)layout, (int)use);
      order_scene made = order_scene_open(verb, transport, where, layout, (stream_use)use);
      order_scene_play(&made, verb, false);
      CHECK_EQUAL(sim_race_count(made.world), 0);
      order_scene_check(&made, verb);
      order_scene_close(&made);
    }
  }
  check_case("%s", "");
}

/* Home's own rank, and all others, on the device of home, and each on another stream. */
static void test_one_device(void) {
  for (int32_t number = 0; number < VERB_COUNT * STREAM_USES; ++number) {
    order_verb verb = (order_verb)(number % VERB_COUNT);
    stream_use use = (stream_use)(number / VERB_COUNT);
    check_case("local, verb %d, streams %d", (int)verb, (int)use);
    order_scene made = order_scene_open(verb, "local", one_device, RIG_ROWS, use);
    order_scene_play(&made, verb, false);
    CHECK_EQUAL(sim_race_count(made.world), 0);
    order_scene_check(&made, verb);
    order_scene_close(&made);
  }
  check_case("%s", "");
}

/* Counts the waits that make no race when they are left out. */
static int32_t count_idle_waits(order_verb verb, const char *transport, const order_map *where,
                                rig_layout layout, stream_use use) {
  order_scene made = order_scene_open(verb, transport, where, layout, use);
  order_scene_play(&made, verb, true);
  CHECK_EQUAL(sim_race_count(made.world), 0);
  int32_t wait_count = sim_wait_count(made.world) - made.first_wait;
  order_scene_close(&made);
  CHECK(wait_count >= ROUNDS * (use == OWN_STREAMS ? where->rank_count : 1));
  int32_t idle_count = 0;
  for (int32_t nth = 1; nth <= wait_count; ++nth) {
    made = order_scene_open(verb, transport, where, layout, use);
    sim_leave_out_wait(made.world, made.first_wait + nth);
    order_scene_play(&made, verb, true);
    idle_count += sim_race_count(made.world) == 0;
    order_scene_close(&made);
  }
  return idle_count;
}

/* Of these maps the third has two leads, a target that follows one of them, and one on home's
 * device. Idle are:
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
      CHECK_EQUAL(count_idle_waits((order_verb)verb, transports[t], &order_maps[2], RIG_ROWS,
                                   OWN_STREAMS),
                  idle_waits[t][verb]);
    }
  }
  /* Two devices, whose buckets go in chunks. Gradients are read in place or, of a lone tensor,
   * fetched; those off the alignment are packed. */
  for (int32_t verb = 0; verb < VERB_COUNT; ++verb) {
    check_case("peer in chunks, verb %d", verb);
    CHECK_EQUAL(count_idle_waits((order_verb)verb, "peer", &order_maps[0], RIG_ROWS, OWN_STREAMS),
                0);
    CHECK_EQUAL(count_idle_waits((order_verb)verb, "peer", &order_maps[0], RIG_SHIFTED,
                                 OWN_STREAMS), 0);
  }
  /* The first caller on default streams, for whom lanes copy. Idle are: in its three rounds the
   * waits of the other GPU for its lane's chunks of a bucket, but for the last of four; and those
   * of shards, as above. */
  for (int32_t verb = 0; verb < VERB_COUNT; ++verb) {
    check_case("peer on default streams, verb %d", verb);
    CHECK_EQUAL(count_idle_waits((order_verb)verb, "peer", &order_maps[0], RIG_ROWS, DEFAULT_FIRST),
                verb == BUCKET_BROADCAST ? 3 * 3 : 0);
    CHECK_EQUAL(count_idle_waits((order_verb)verb, "peer", &order_maps[1], RIG_ROWS, DEFAULT_FIRST),
                idle_waits[0][verb]);
  }
  for (int32_t verb = 0; verb < VERB_COUNT; ++verb) {
    check_case("local and peer on one device, verb %d", verb);
    CHECK_EQUAL(count_idle_waits((order_verb)verb, "local", one_device, RIG_ROWS, OWN_STREAMS), 0);
    CHECK_EQUAL(count_idle_waits((order_verb)verb, "peer", one_device, RIG_ROWS, OWN_STREAMS), 0);
  }
  check_case("%s", "");
}

void test_transport_order(void) {
  test_no_races();
  test_one_device();
  test_left_out_waits();
}
