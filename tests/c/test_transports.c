/* What the transports between GPUs promise beside right values (the tests of the verbs run over
 * them too): who waits for whom, host memory among the devices, peers that stall. */
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/bucket.h"
#include "../../csrc/device_host.h"
#include "../../csrc/gather.h"
#include "../../csrc/log.h"
#include "../../csrc/scatter.h"
#include "cases.h"
#include "check.h"
#include "host_work.h"
#include "rig.h"

/* --- who waits for whom --- */

static bool has_passed(const rig *ranks, int32_t rank, int64_t timeout_ms) {
  fdp_device *device = ranks->devices[rank];
  fdp_event *event = NULL;
  CHECK_OK(device->ops->event_open(device, &event));
  CHECK_OK(device->ops->event_record(device, event, ranks->streams[rank]));
  fdp_status status = device->ops->event_synchronize(device, event, timeout_ms, NULL);
  device->ops->event_close(device, event);
  return status == FDP_OK;
}

enum { LATE = 2, RANKS = 4, TENSORS = 2 };

/* One rank's stream is busy. In a reduction, of which home is rank 0, the others are free as soon
 * as their own gradients are read; in a broadcast, home is. So it stays for as many rounds as a
 * pool has scratch for. (Among more than two devices, as here. Between two, and where a tensor is
 * alone in its bucket, large gradients are read where they lie.) */
static void test_own_reads(rig_means means) {
  rig ranks;
  sem_t gate;
  rig_open(&ranks, means);
  sem_init(&gate, 0, 0);
  rig_array sources[RANKS * TENSORS], flats[RANKS];
  fdp_view views[RANKS * TENSORS], flat_views[RANKS];
  const fdp_view *gradients[RANKS * TENSORS];
  fdp_bucket *bucket = NULL;
  for (int32_t i = 0; i < RANKS * TENSORS; ++i) {
    sources[i] = rig_array_open(float32, 1, (int64_t[]){96}, RIG_ROWS, ranks.ids[i / TENSORS]);
    views[i] = sources[i].view;
    gradients[i] = &views[i];
    rig_fill(&sources[i], i);
  }
  for (int32_t r = 0; r < RANKS; ++r) {
    flats[r] = rig_array_open(float32, 1, (int64_t[]){96 * TENSORS}, RIG_ROWS, ranks.ids[r]);
    flat_views[r] = flats[r].view;
  }
  CHECK_OK(fdp_bucket_open(views, NULL, TENSORS, &bucket));
  CHECK_OK(fdp_device_host_enqueue(ranks.devices[LATE], ranks.streams[LATE], wait_for_semaphore,
                                   &gate));
  for (int32_t round = 0; round < FDP_POOL_DEPTH; ++round) {
    CHECK_OK(fdp_bucket_reduce(ranks.context, bucket, gradients, ranks.streams, RANKS,
                               &flat_views[0], ranks.streams[0]));
    CHECK(has_passed(&ranks, 1, 10000));
    CHECK(has_passed(&ranks, 3, 10000));
    CHECK(!has_passed(&ranks, 0, 1));
  }
  sem_post(&gate);
  rig_finish(&ranks);
  CHECK_OK(fdp_device_host_enqueue(ranks.devices[LATE], ranks.streams[LATE], wait_for_semaphore,
                                   &gate));
  for (int32_t round = 0; round < FDP_POOL_DEPTH; ++round) {
    CHECK_OK(fdp_bucket_broadcast(ranks.context, bucket, views, ranks.streams[0], flat_views + 1,
                                  ranks.streams + 1, RANKS - 1));
    CHECK(has_passed(&ranks, 0, 10000));
    CHECK(!has_passed(&ranks, LATE, 1));
  }
  sem_post(&gate);
  rig_finish(&ranks);
  fdp_bucket_close(bucket);
  rig_close(&ranks);
  for (int32_t i = 0; i < RANKS * TENSORS; ++i) rig_array_close(&sources[i]);
  for (int32_t r = 0; r < RANKS; ++r) rig_array_close(&flats[r]);
}

/* --- host memory among GPUs --- */

/* From the host to GPUs whose streams are busy: the call returns all the same. And back: what the
 * call brings to the host is there when it returns. */
static void test_host_memory(rig_layout layout) {
  rig ranks;
  sem_t gate;
  rig_open(&ranks, RIG_HOST);
  sem_init(&gate, 0, 0);
  int64_t shape[] = {12, 5}, part[] = {4, 5};
  rig_array whole = rig_array_open(float32, 2, shape, layout, host);
  rig_array back = rig_array_open(float32, 2, shape, layout, host);
  rig_array parts[3];
  fdp_view views[3];
  rig_fill(&whole, 3);
  for (int32_t r = 0; r < 3; ++r) {
    parts[r] = rig_array_open(float32, 2, part, layout, ranks.ids[r]);
    views[r] = parts[r].view;
    CHECK_OK(fdp_device_host_enqueue(ranks.devices[r], ranks.streams[r], wait_for_semaphore,
                                     &gate));
  }
  CHECK_OK(fdp_scatter(ranks.context, &whole.view, NULL, views, ranks.streams, 3, 0));
  for (int32_t r = 0; r < 3; ++r) CHECK(!has_passed(&ranks, r, 1));
  for (int32_t r = 0; r < 3; ++r) sem_post(&gate);
  CHECK_OK(fdp_gather(ranks.context, views, ranks.streams, 3, &back.view, NULL, 0));
  for (int64_t i = 0; i < 60; ++i) {
    CHECK_EQUAL(rig_load(float32, rig_address(&back.view, i)), rig_value(3, i));
  }
  CHECK(rig_guards_hold(&back));
  rig_finish(&ranks);
  for (int32_t r = 0; r < 3; ++r) {
    CHECK(rig_guards_hold(&parts[r]));
    rig_array_close(&parts[r]);
  }
  rig_close(&ranks);
  rig_array_close(&whole);
  rig_array_close(&back);
}

static fdp_status fail_for_good(void *unused) {
  (void)unused;
  return fdp_fail(FDP_DEVICE_ERROR, "gone wrong");
}

/* A copy from a GPU to a stream of the host that has failed: it is told by what it failed of first,
 * whatever else goes wrong while it cleans up. */
static void test_first_failure(void) {
  rig ranks;
  fdp_device *device = NULL;
  fdp_stream *stream = NULL;
  rig_open(&ranks, RIG_HOST);
  rig_array source = rig_array_open(float32, 1, (int64_t[]){200}, RIG_ROWS, ranks.ids[1]);
  rig_array target = rig_array_open(float32, 1, (int64_t[]){200}, RIG_ROWS, host);
  rig_fill(&source, 1);
  CHECK_OK(fdp_context_device(ranks.context, host, &device));
  CHECK_OK(device->ops->stream_open(device, &stream));
  CHECK_OK(fdp_device_host_enqueue(device, stream, fail_for_good, NULL));
  int32_t shortages = 0;
  for (bool reached = true; reached; ++shortages) {
    check_case("allocation %d fails", shortages + 1);
    check_fail_allocation(shortages + 1);
    fdp_status status = fdp_gather(ranks.context, &source.view, &ranks.streams[1], 1, &target.view,
                                   stream, 0);
    reached = check_allocation_failed();
    CHECK_EQUAL(status, reached ? FDP_OUT_OF_MEMORY : FDP_DEVICE_ERROR);
    CHECK((strcmp(fdp_last_message(), "gone wrong") == 0) == (status == FDP_DEVICE_ERROR));
  }
  CHECK(shortages > 4);
  check_case("%s", "");
  rig_finish(&ranks);
  device->ops->stream_close(device, stream);
  rig_close(&ranks);
  rig_array_close(&target);
  rig_array_close(&source);
}

/* --- peers that stall --- */

/* The check leaves everything open when peers stall: kept here, to close it in their place. */
static const fdp_device_ops *real_ops;
static void *left_memory[8];
static fdp_stream *left_streams[8];
static fdp_event *left_events[8];
static int32_t memory_count, stream_count, event_count;
static bool stalls;

static fdp_status take_noted(fdp_device *device, size_t size_bytes, void **address) {
  fdp_status status = real_ops->memory_take(device, size_bytes, address);
  if (stalls && status == FDP_OK) left_memory[memory_count++] = *address;
  return status;
}

static fdp_status stream_noted(fdp_device *device, fdp_stream **stream) {
  fdp_status status = real_ops->stream_open(device, stream);
  if (stalls && status == FDP_OK) left_streams[stream_count++] = *stream;
  return status;
}

static fdp_status event_noted(fdp_device *device, fdp_event **event) {
  fdp_status status = real_ops->event_open(device, event);
  if (stalls && status == FDP_OK) left_events[event_count++] = *event;
  return status;
}

static fdp_status never(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                        const volatile int *abort_flag) {
  if (!stalls) return real_ops->event_synchronize(device, event, timeout_ms, abort_flag);
  return fdp_fail(FDP_TIMED_OUT, "not done within %d ms", (int)timeout_ms);
}

static int32_t warning_count;
static char warning[FDP_MESSAGE_BYTES];

static void sink(void *unused, fdp_log_level level, const char *message) {
  (void)unused;
  warning_count += level == FDP_LOG_WARNING;
  strncpy(warning, message, sizeof warning - 1);
}

static void test_stall(void) {
  fdp_device_host_options options = {.kind = FDP_DEVICE_CUDA, .timeout_ms = 20000};
  const fdp_device_id ids[] = {{FDP_DEVICE_CUDA, 0}, {FDP_DEVICE_CUDA, 1}};
  static fdp_device_ops stalling;
  fdp_device *devices[2];
  fdp_context *context = NULL;
  fdp_party party;
  CHECK_OK(fdp_context_open(&context));
  for (; options.ordinal < 2; ++options.ordinal) {
    CHECK_OK(fdp_device_host_open(&options, &devices[options.ordinal]));
    real_ops = devices[options.ordinal]->ops;
    stalling = *real_ops;
    stalling.memory_take = stalling.pinned_take = take_noted;
    stalling.stream_open = stream_noted;
    stalling.event_open = event_noted;
    stalling.event_synchronize = never;
    devices[options.ordinal]->ops = &stalling;
    CHECK_OK(fdp_context_adopt(context, devices[options.ordinal]));
  }
  fdp_log_open(sink, NULL, FDP_LOG_WARNING);
  stalls = true;
  for (int32_t i = 0; i < 2; ++i) {
    CHECK_OK(fdp_context_party(context, NULL, ids[0], NULL, ids, NULL, 2, &party));
    CHECK_TEXT(party.transport->ops->name, "host");
    CHECK_EQUAL(warning_count, 1);
    CHECK_TEXT(warning, "cuda:0 and cuda:1 failed the check of peer copies: not done within 20000 "
               "ms");
  }
  stalls = false;
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
  CHECK_EQUAL(memory_count, 3);
  for (int32_t i = 0; i < stream_count; ++i) real_ops->stream_close(devices[0], left_streams[i]);
  for (int32_t i = 0; i < event_count; ++i) real_ops->event_close(devices[0], left_events[i]);
  for (int32_t i = 0; i < memory_count; ++i) real_ops->memory_drop(devices[0], left_memory[i]);
  fdp_context_close(context);
}

/* A rank that contributes nothing: its stream, of another device than home, is left alone. */

static fdp_stream *foreign_stream;
static int32_t foreign_count;

static fdp_status record_watched(fdp_device *device, fdp_event *event, fdp_stream *stream) {
  foreign_count += device->id.ordinal == 0 && stream == foreign_stream;
  return real_ops->event_record(device, event, stream);
}

static fdp_status wait_watched(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  foreign_count += device->id.ordinal == 0 && stream == foreign_stream;
  return real_ops->stream_wait(device, stream, event);
}

static void test_idle_rank(void) {
  static const int64_t shape[] = {6};
  fdp_device_host_options options = {.kind = FDP_DEVICE_CUDA, .timeout_ms = 20000};
  static fdp_device_ops watched;
  fdp_device *devices[2];
  fdp_stream *streams[2];
  fdp_context *context = NULL;
  fdp_bucket *bucket = NULL;
  CHECK_OK(fdp_context_open(&context));
  for (; options.ordinal < 2; ++options.ordinal) {
    CHECK_OK(fdp_device_host_open(&options, &devices[options.ordinal]));
    real_ops = devices[options.ordinal]->ops;
    watched = *real_ops;
    watched.event_record = record_watched;
    watched.stream_wait = wait_watched;
    devices[options.ordinal]->ops = &watched;
    CHECK_OK(fdp_context_adopt(context, devices[options.ordinal]));
    CHECK_OK(real_ops->stream_open(devices[options.ordinal], &streams[options.ordinal]));
  }
  rig_array gradient = rig_array_open(float32, 1, shape, RIG_ROWS, devices[0]->id);
  rig_array flat = rig_array_open(float32, 1, shape, RIG_ROWS, devices[0]->id);
  const fdp_view *gradients[] = {&gradient.view, NULL};
  rig_fill(&gradient, 3);
  foreign_stream = streams[1];
  CHECK_OK(fdp_bucket_open(&gradient.view, NULL, 1, &bucket));
  CHECK_OK(fdp_bucket_reduce(context, bucket, gradients, streams, 2, &flat.view, streams[0]));
  CHECK_EQUAL(foreign_count, 0);
  fdp_bucket_close(bucket);
  for (int32_t d = 0; d < 2; ++d) real_ops->stream_close(devices[d], streams[d]);
  for (int64_t i = 0; i < shape[0]; ++i) {
    CHECK_EQUAL(rig_load(float32, rig_address(&flat.view, i)), rig_value(3, i));
  }
  fdp_context_close(context);
  rig_array_close(&flat);
  rig_array_close(&gradient);
}

void test_transports(void) {
  test_own_reads(RIG_PEER);
  test_own_reads(RIG_HOST);
  for (int32_t layout = 0; layout < RIG_EXPANDED; ++layout) test_host_memory((rig_layout)layout);
  test_first_failure();
  test_stall();
  test_idle_rank();
}
