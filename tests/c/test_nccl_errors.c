/* What goes wrong in NCCL: failures, errors that show later, calls that never return; and the order
 * between groups of different communicators. */
#include <stdio.h>
#include <stdlib.h>

#include "../../csrc/broadcast.h"
#include "../../csrc/gather.h"
#include "../../csrc/limits.h"
#include "../../csrc/nccl.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "check.h"
#include "fake_gpu.h"
#include "rig.h"
#include "sim.h"

static const fake_nccl_table *fake;

/* One call of each verb on two devices. */
static fdp_status use(rig *ranks, int32_t verb) {
  const int64_t whole_shape[] = {4, 3}, part_shape[] = {2, 3};
  bool is_whole = verb >= 2;
  rig_array whole = rig_array_open(float32, 2, whole_shape, RIG_COLUMNS, ranks->ids[0]);
  rig_array parts[2];
  fdp_view views[2];
  for (int32_t r = 0; r < 2; ++r) {
    parts[r] = rig_array_open(float32, 2, is_whole ? whole_shape : part_shape, RIG_ROWS,
                              ranks->ids[r]);
    rig_fill(&parts[r], r);
    views[r] = parts[r].view;
  }
  rig_fill(&whole, 5);
  fdp_stream *home = ranks->streams[0];
  fdp_status status;
  if (verb == 0) {
    status = fdp_scatter(ranks->context, &whole.view, home, views, ranks->streams, 2, 0);
  } else if (verb == 1) {
    status = fdp_gather(ranks->context, views, ranks->streams, 2, &whole.view, home, 0);
  } else if (verb == 2) {
    status = fdp_broadcast(ranks->context, &whole.view, home, views, ranks->streams, 2);
  } else {
    status = fdp_reduce(ranks->context, views, ranks->streams, 2, &whole.view, home);
  }
  char message[FDP_MESSAGE_BYTES];
  snprintf(message, sizeof message, "%s", fdp_last_message());
  rig_finish(ranks);
  for (int32_t r = 0; r < 2; ++r) rig_array_close(&parts[r]);
  rig_array_close(&whole);
  return status == FDP_OK ? FDP_OK : fdp_fail(status, "%s", message);
}

/* Makes communicators for four devices too. */
static fdp_status use_four(const rig *ranks) {
  char reason[FDP_MESSAGE_BYTES];
  const char *name = NULL;
  return fdp_context_transport(ranks->context, NULL, ranks->ids[0], ranks->ids, 4, &name, reason,
                               sizeof reason);
}

/* Every call of NCCL's fails in turn: a clear error, all communicators gone, and the next use
 * works. */
static void test_failures(void) {
  static const char *const calls[] = {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclReduce",
                                      "ncclGroupEnd"};
  static const int32_t verbs[] = {0, 1, 2, 3, 3};
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; ++i) {
    rig ranks;
    rig_open(&ranks, RIG_NCCL);
    check_case("%s", calls[i]);
    CHECK_OK(use(&ranks, verbs[i]));
    fake_nccl_counts before = fake->read();
    fake->fail(calls[i], 1, FDP_NCCL_SYSTEM_ERROR);
    fdp_status status = use(&ranks, verbs[i]);
    CHECK_FAILS(status, FDP_DEVICE_ERROR, verbs[i] == 3 ?
                "nccl: reduce over cuda:1, cuda:2: unhandled system error: the fake was told to" :
                "nccl: copying between cuda:1, cuda:2: unhandled system error: the fake was told "
                "to");
    CHECK_EQUAL(fake->read().aborted, before.made);
    CHECK_OK(use(&ranks, verbs[i]));
    CHECK_EQUAL(fake->read().made, 2 * before.made);
    rig_close(&ranks);
  }
}

/* An error that shows later, on one device, ends the communicators of all. */
static void test_async_error(void) {
  rig ranks;
  rig_open(&ranks, RIG_NCCL);
  CHECK_OK(use(&ranks, 3));
  CHECK_OK(use_four(&ranks));
  fake->fail_rank(1, FDP_NCCL_REMOTE_ERROR);
  CHECK_FAILS(use(&ranks, 3), FDP_DEVICE_ERROR,
              "nccl: an earlier operation failed on cuda:2: remote process exited or there was a "
              "network error: the fake was told to");
  CHECK_EQUAL(fake->read().made, 6);
  CHECK_EQUAL(fake->read().aborted, 6);
  CHECK_OK(use(&ranks, 3));
  CHECK_EQUAL(fake->read().made, 8);
  rig_close(&ranks);
}

/* What cannot be made or connected is a reason not to join, and is not tried again. */
static void check_no_set(const char *call, bool hangs, const char *message, int made,
                         int aborted) {
  rig ranks;
  char text[FDP_MESSAGE_BYTES];
  setenv("FASTDP_TIMEOUT_MS", "50", 1);
  rig_open(&ranks, RIG_NCCL);
  unsetenv("FASTDP_TIMEOUT_MS");
  check_case("%s", call);
  if (hangs) {
    fake->hang(call);
  } else {
    fake->fail(call, 1, FDP_NCCL_CUDA_ERROR);
  }
  snprintf(text, sizeof text, "FASTDP_TRANSPORT=nccl does not join the devices: %s", message);
  CHECK_FAILS(use(&ranks, 3), FDP_UNSUPPORTED, text);
  fake->release();
  CHECK_FAILS(use(&ranks, 0), FDP_UNSUPPORTED, text);
  CHECK_EQUAL(fake->read().made, made);
  CHECK_EQUAL(fake->read().aborted, aborted);
  rig_close(&ranks);
}

static void test_no_set(void) {
  const char *making = "nccl: making communicators for cuda:1, cuda:2: unhandled cuda error: the "
                       "fake was told to";
  const char *connecting = "nccl: connecting cuda:1, cuda:2: unhandled cuda error: the fake was "
                           "told to";
  const char *stuck = "nccl: making communicators for cuda:1, cuda:2: not done within 50 ms";
  check_no_set("ncclGetUniqueId", false, making, 0, 0);
  check_no_set("ncclCommInitRankConfig", false, making, 0, 0);
  check_no_set("ncclGroupStart", false, making, 0, 0);
  check_no_set("ncclGroupEnd", false, making, 0, 0);
  check_no_set("ncclBroadcast", false, connecting, 2, 2);
  check_no_set("ncclReduce", false, connecting, 2, 2);
  check_no_set("ncclRecv", false, connecting, 2, 2);
  check_no_set("ncclCommGetAsyncError", false, "nccl: an earlier operation failed on cuda:1: "
               "unhandled cuda error: the fake was told to", 2, 2);
  check_no_set("ncclGetUniqueId", true, stuck, 0, 0);
  check_no_set("ncclCommInitRankConfig", true, stuck, 0, 0);
  check_no_set("ncclGroupEnd", true, stuck, 0, 0);
  /* Aborting wakes it. */
  check_no_set("ncclReduce", true, "nccl: connecting cuda:1, cuda:2: not done within 50 ms", 2, 2);
}

/* Two broadcasts by different communicators write the same memory of the device that both have, on
 * different streams: a race, but for the turns that NCCL's groups take. */
static int32_t count_races(const char *transport) {
  const int64_t shape[] = {5};
  sim *world = sim_open(7);
  fdp_context *context = NULL;
  fdp_device_id ids[3];
  rig_array sources[3], target;
  fdp_stream *streams[3], *shared_streams[2];
  char reason[FDP_MESSAGE_BYTES];
  const char *name = NULL;
  setenv("FASTDP_NCCL", FAKE_NCCL_PATH, 1);
  context = rig_context_open(transport);
  for (int32_t d = 0; d < 3; ++d) {
    fdp_device *device = sim_device(world, FDP_DEVICE_CUDA, d);
    fake_gpu_wrap(device);
    ids[d] = device->id;
    CHECK_OK(fdp_context_adopt(context, device));
    streams[d] = sim_stream(world);
    sources[d] = rig_array_open(float32, 1, shape, RIG_ROWS, ids[d]);
  }
  target = rig_array_open(float32, 1, shape, RIG_ROWS, ids[1]);
  for (int32_t i = 0; i < 2; ++i) { /* all that is done once */
    shared_streams[i] = sim_stream(world);
    CHECK_OK(fdp_context_transport(context, NULL, ids[2 * i], &ids[1], 1, &name, reason,
                                   sizeof reason));
  }
  for (int32_t i = 0; i < 2; ++i) {
    CHECK_OK(fdp_broadcast(context, &sources[2 * i].view, streams[2 * i], &target.view,
                           &shared_streams[i], 1));
  }
  sim_run(world);
  int32_t races = sim_race_count(world);
  fdp_context_close(context);
  fake_gpu_finish();
  sim_close(world);
  for (int32_t d = 0; d < 3; ++d) rig_array_close(&sources[d]);
  rig_array_close(&target);
  return races;
}

static void test_turns(void) {
  CHECK_EQUAL(count_races("nccl"), 0);
  CHECK_EQUAL(count_races("peer"), 1);
}

void test_nccl_errors(void) {
  fake = fake_nccl_get();
  CHECK(fake != NULL);
  if (!fake) return;
  test_failures();
  test_async_error();
  test_no_set();
  test_turns();
}
