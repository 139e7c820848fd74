#include "simulate_world.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "fake_gpu.h"
#include "sim_threads.h"

enum { ROUNDS = 6 };

static sim *current; /* for what the fake library and the checks have to say */
static volatile uint64_t current_seed;

uint64_t world_seed(void) { return current_seed; }

/* --- what the shared test files ask for --- */

void check_spare_allocations(bool is_on) { sim_spare(current, is_on); }

void check_true(bool is_true, const char *file, int line, const char *text) {
  if (!is_true) sim_report(current, "%s:%d: not true: %s", file, line, text);
}

void check_equal(int64_t actual, int64_t expected, const char *file, int line, const char *text) {
  if (actual == expected) return;
  sim_report(current, "%s:%d: %s is %lld, expected %lld", file, line, text, (long long)actual,
             (long long)expected);
}

void check_text(const char *actual, const char *expected, const char *file, int line) {
  if (strcmp(actual, expected) != 0) sim_report(current, "%s:%d: \"%s\"", file, line, actual);
}

void check_status(fdp_status status, fdp_status expected, const char *message, const char *file,
                  int line) {
  (void)message;
  if (status == expected) return;
  sim_report(current, "%s:%d: %s: %s", file, line, fdp_status_name(status), fdp_last_message());
}

/* Of the fake library. */
static void watch_groups(fdp_device *device, fdp_stream *const *streams, int32_t count,
                         const void *set, bool ends) {
  if (ends) {
    sim_turn_end(current, device, streams, count, set);
  } else {
    sim_turn_begin(current, device, streams, count, set);
  }
}

/* --- a world --- */

/* What carries between the devices, by the environment that the context reads. */
static int32_t choose_transport(sim *world, bool *has_nccl, bool *forbids) {
  static const char *const names[] = {"peer", "host", "nccl", "auto"};
  uint64_t number = sim_choose(world, 4);
  bool finds_nccl = number == 2 || sim_choose(world, 2) == 0;
  *forbids = number == 3 && sim_choose(world, 2) == 0;
  *has_nccl = number == 2 || (*forbids && finds_nccl);
  setenv("FASTDP_TRANSPORT", names[number], 1);
  setenv("FASTDP_NCCL", finds_nccl ? FAKE_NCCL_PATH : "/nowhere/libnccl.so", 1);
  int32_t count = 2 + (int32_t)sim_choose(world, MAX_DEVICES - 1);
  if (sim_choose(world, 12) == 0 && number != 2) count = 1;
  return *has_nccl && count > 4 ? 4 : count; /* each set of communicators has streams */
}

/* GPUs that do not reach each other: the first two, all but pairs of them (islands), or any. */
static void forbid_peers(run *own) {
  uint64_t kind = sim_choose(own->world, 3);
  for (int32_t a = 0; a < own->device_count; ++a) {
    for (int32_t b = 0; b < own->device_count; ++b) {
      bool is_cut = kind == 0 ? a == 0 && b == 1 : a / 2 != b / 2;
      if (kind == 2) is_cut = sim_choose(own->world, 4) == 0;
      if (is_cut && a != b) sim_forbid_peer(own->devices[a], own->devices[b]);
    }
  }
}

/* Two GPUs whose copies to each other arrive changed. */
static void spoil_peers(run *own) {
  char pair[32];
  uint64_t count = (uint64_t)own->device_count;
  int32_t a = (int32_t)sim_choose(own->world, count), b = (int32_t)sim_choose(own->world, count);
  snprintf(pair, sizeof pair, "%d-%d", a, b);
  setenv("FASTDP_TEST_BAD_PEER", pair, 1);
}

/* Has what is slow, and kept, be done for home and a random choice of devices, or all. */
static void warm_up(run *own, bool takes_all) {
  fdp_device_id ids[MAX_DEVICES];
  const char *name = NULL;
  char reason[200];
  int32_t count = 1;
  ids[0] = own->devices[0]->id;
  for (int32_t d = 1; d < own->device_count; ++d) {
    if (takes_all || sim_choose(own->world, 3) != 0) ids[count++] = own->devices[d]->id;
  }
  CHECK_OK(fdp_context_transport(own->context, NULL, ids[0], ids, count, &name, reason,
                                 sizeof reason));
}

/* The check of a pair and NCCL's connections have deadlines of their own, and what they find out
 * stays. */
static void warm_up_pairs(run *own) {
  const char *name = NULL;
  char reason[200];
  for (int32_t a = 0; a < own->device_count; ++a) {
    for (int32_t b = 0; b < own->device_count; ++b) {
      CHECK_OK(fdp_context_transport(own->context, NULL, own->devices[a]->id, &own->devices[b]->id,
                                     1, &name, reason, sizeof reason));
    }
  }
}

static void try_context(void) {
  fdp_context *context = NULL;
  setenv("FASTDP_TEST_BAD_PEER", "nobody", 1);
  CHECK_EQUAL(fdp_context_open(&context), FDP_INVALID_ARGUMENT);
  unsetenv("FASTDP_TEST_BAD_PEER");
}

/* One whose opening fails at some call, and that is of no use. */
static void try_device(run *own) {
  fdp_device *device = sim_device(own->world, FDP_DEVICE_CUDA, MAX_DEVICES);
  sim_fail_call(own->world, 1 + (int64_t)sim_choose(own->world, 2));
  fdp_status status = fdp_context_adopt(own->context, device);
  CHECK_EQUAL(status != FDP_OK, sim_call_failed(own->world));
  sim_fail_call(own->world, 0);
}

static void run_open(run *own, uint64_t seed, bool explains, bool stalls, FILE *trace) {
  bool forbids = false;
  *own = (run){.seed = seed, .world = sim_open(seed), .stalls = stalls};
  sim *world = current = own->world;
  if (explains) sim_explain(world);
  sim_trace_to(world, trace);
  own->device_count = choose_transport(world, &own->has_nccl, &forbids);
  if (sim_choose(world, 8) == 0) try_context();
  if (forbids && sim_choose(world, 4) == 0) spoil_peers(own);
  CHECK_OK(fdp_context_open(&own->context));
  unsetenv("FASTDP_TEST_BAD_PEER");
  for (int32_t d = 0; d < own->device_count; ++d) {
    own->devices[d] = sim_device(world, FDP_DEVICE_CUDA, d);
    fake_gpu_wrap(own->devices[d]);
    CHECK_OK(fdp_context_adopt(own->context, own->devices[d]));
  }
  own->devices[MAX_DEVICES] = sim_device(world, FDP_DEVICE_HOST, 0);
  CHECK_OK(fdp_context_adopt(own->context, own->devices[MAX_DEVICES]));
  if (sim_choose(world, 8) == 0) try_device(own);
  if (forbids) forbid_peers(own);
  for (uint64_t i = sim_choose(world, 3); i > 0 && own->has_nccl; --i) warm_up(own, false);
  if (!own->has_nccl || sim_choose(world, 2) == 0) warm_up(own, true);
  if (stalls) warm_up_pairs(own);
  bool fills = sim_choose(world, 2) == 0;
  for (int32_t d = 0; d < own->device_count && fills; ++d) {
    CHECK_OK(fdp_pool_debug_fill(fdp_context_pool(own->context, own->devices[d])));
  }
  own->caller_count = 1 + (int32_t)sim_choose(world, MAX_CALLERS);
  for (int32_t i = 0; i < own->caller_count; ++i) {
    own->callers[i].run = own;
    own->callers[i].number = i;
    fdp_device *host_device = own->devices[MAX_DEVICES];
    CHECK_OK(host_device->ops->stream_open(host_device, &own->callers[i].host_stream));
  }
}

/* All is over, so that nothing has to be held: what is stale goes, what is idle is there for
 * whoever is short of memory, and in the end all can go. */
static void check_pool(run *own, fdp_device *device) {
  fdp_pool *pool = fdp_context_pool(own->context, device);
  fdp_buffer *buffer = NULL;
  for (int32_t i = 0; i <= FDP_POOL_STALE_GIVES; ++i) {
    CHECK_OK(fdp_pool_take(pool, 1, NULL, &buffer));
    CHECK_OK(fdp_pool_give(pool, buffer, NULL));
    sim_run(own->world);
  }
  CHECK_EQUAL(fdp_pool_read_stats(pool).idle_bytes <= FDP_POOL_IDLE_BYTES, true);
  sim_fill_device(device);
  CHECK_OK(fdp_pool_take(pool, 1 << 16, NULL, &buffer));
  CHECK_OK(fdp_pool_give(pool, buffer, NULL));
  sim_run(own->world);
  fdp_pool_trim(pool);
  CHECK_EQUAL(fdp_pool_read_stats(pool).idle_count, 0);
}

static void run_close(run *own) {
  sim_retire(own->world);
  for (int32_t i = 0; i < own->caller_count; ++i) {
    fdp_device *host_device = own->devices[MAX_DEVICES];
    host_device->ops->stream_close(host_device, own->callers[i].host_stream);
    for (int32_t d = 0; d < own->device_count; ++d) {
      for (int32_t k = 0; k < STREAMS_EACH * 2; ++k) {
        fdp_stream *stream = own->callers[i].streams[d][k / 2][k % 2];
        if (stream) own->devices[d]->ops->stream_close(own->devices[d], stream);
      }
    }
  }
  run_drop_blocks(own);
  for (int32_t d = 0; d < own->device_count; ++d) check_pool(own, own->devices[d]);
  fdp_context_close(own->context);
  CHECK_EQUAL(sim_open_count(own->world), 0);
  fake_gpu_finish();
}

/* In a third of all rounds something fails. */
static void arm(run *own) {
  static const char *const calls[] = {"ncclGroupStart", "ncclGroupEnd", "ncclBroadcast",
                                      "ncclReduce",     "ncclSend",     "ncclRecv",
                                      "ncclCommGetAsyncError"};
  sim *world = own->world;
  if (sim_choose(world, 3) != 0) return;
  own->armed_count += 1;
  if (own->has_nccl && sim_choose(world, 2) == 0) {
    fake_nccl_get()->fail(calls[sim_choose(world, 7)], 1 + (int)sim_choose(world, 4), 3);
  } else {
    sim_fail_call(world, 1 + (int64_t)sim_choose(world, 300));
  }
}

static void play_round(run *own, bool arms, world_totals *sums) {
  sim *world = own->world;
  void *arguments[MAX_CALLERS];
  sim_policy policy = (sim_policy)sim_choose(world, SIM_POLICY_COUNT);
  sim_set_policy(world, policy, sim_choose(world, UINT64_C(1) << 40));
  for (int32_t i = 0; i < own->caller_count; ++i) {
    model_open(&own->callers[i]);
    arguments[i] = &own->callers[i];
  }
  int64_t before = own->done_steps + own->failed_steps;
  if (arms) arm(own);
  sim_threads_run(world, caller_train, arguments, own->caller_count);
  sim_resume(world);
  if (arms) sim_fail_call(world, 0);
  fake_nccl_get()->fail("none", 0, 0);
  sim_retire(world);
  for (int32_t i = 0; i < own->caller_count; ++i) {
    caller_free_late(&own->callers[i]);
    model_check(&own->callers[i]);
    model_close(&own->callers[i]);
  }
  run_forget(own);
  sums->policies[policy] += own->done_steps + own->failed_steps - before;
}

world_outcome world_play(uint64_t seed, bool explains, FILE *trace, int64_t failing_call,
                         bool stalls, world_totals *sums) {
  static run own;
  world_outcome result = {.report = ""};
  int64_t before = heap_live_count();
  current_seed = seed;
  fake_nccl_get()->set_watch(watch_groups);
  run_open(&own, seed, explains, stalls, trace);
  result.first_call = sim_call_count(own.world) + 1;
  int32_t rounds = failing_call == 0 ? ROUNDS : failing_call < 0 ? 1 : 2;
  if (failing_call > 0 && stalls) {
    sim_stall_call(own.world, failing_call - sim_call_count(own.world));
  } else if (failing_call > 0) {
    own.armed_count = 1;
    sim_fail_call(own.world, failing_call - sim_call_count(own.world));
  }
  for (int32_t i = 0; i < rounds && !own.is_refused; ++i) {
    play_round(&own, failing_call == 0, sums);
    result.call_count = i == 0 ? sim_call_count(own.world) : result.call_count;
  }
  run_close(&own);
  result.trace_hash = sim_trace_hash(own.world);
  if (sim_race_count(own.world) > 0) {
    snprintf(result.report, sizeof result.report, "%s", sim_first_report(own.world));
  }
  /* What a device that never finishes may work on NCCL's sets keep. */
  bool keeps = stalls && own.has_nccl;
  if (keeps && strstr(result.report, "was closed with")) result.report[0] = '\0';
  sums->schedules += own.done_steps + own.failed_steps;
  sums->several += own.several_steps;
  sums->failures += own.failure_count;
  sums->late += own.late_steps;
  sim_close(own.world);
  current = NULL;
  if (!*result.report && !keeps && heap_live_count() != before) {
    snprintf(result.report, sizeof result.report, "%lld blocks of the host's memory are left",
             (long long)(heap_live_count() - before));
  }
  return result;
}
