/* Calls of a device that fail in the middle of a verb between GPUs, on the simulated backend: pools
 * and streams are in order afterwards. */
#include "check.h"
#include "order_scene.h"

/* Fails the n-th call of a device, for every n until none is left. The owners of the targets write
 * them afterwards, as whoever is given their memory next does; then the other caller's call, which
 * takes the scratch that was given back, is right, and so is the first one's when it tries again.
 * */
static void fail_calls(order_verb verb, const order_map *where, stream_use use) {
  bool reached = true;
  int64_t failures = 0;
  for (int64_t nth = 1; reached; ++nth) {
    order_scene made = order_scene_open(verb, "peer", where, RIG_ROWS, use);
    order_caller *first = &made.callers[0];
    order_scene_play(&made, verb, true);
    sim_fail_call(made.world, nth);
    fdp_status status = order_scene_call(&made, first, verb);
    reached = sim_call_failed(made.world);
    sim_fail_call(made.world, 0);
    CHECK_EQUAL(status != FDP_OK, reached);
    if (order_verb_from_home(verb)) {
      order_scene_write_parts(&made, first, 0);
    } else {
      order_scene_write_whole(&made, first, 0);
    }
    CHECK_OK(order_scene_call(&made, &made.callers[1], verb));
    sim_run(made.world);
    order_scene_play(&made, verb, false);
    CHECK_EQUAL(sim_race_count(made.world), 0);
    order_scene_check(&made, verb);
    for (int32_t d = 0; d < MAX_RANKS; ++d) {
      fdp_pool *pool = fdp_context_pool(made.context, made.devices[d]);
      CHECK_EQUAL(fdp_pool_read_stats(pool).lent_count, 0);
    }
    order_scene_close(&made);
    failures += reached;
  }
  CHECK(failures >= 2);
}

/* No device has several ranks: what follows the first of a device may, after a failure, read that
 * one's target later, for nobody. */
void test_transport_failures(void) {
  for (int32_t number = 0; number < VERB_COUNT * 2 * STREAM_USES; ++number) {
    order_verb verb = (order_verb)(number % VERB_COUNT);
    int32_t use = number / VERB_COUNT / 2, where = number / VERB_COUNT % 2;
    check_case("verb %d fails, map %d, streams %d", (int)verb, where, use);
    fail_calls(verb, &order_maps[where], (stream_use)use);
  }
  check_case("%s", "");
}
