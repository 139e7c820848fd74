#include "device_host.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "host_stream.h"

typedef struct host_device {
  fdp_device base;
  fdp_device_host_options options;
} host_device;

static const fdp_device_host_options *options_of(fdp_device *device) {
  return &((host_device *)device)->options;
}

static void device_close(fdp_device *device) { free(device); }

static fdp_status memory_take(fdp_device *device, size_t size_bytes, void **address) {
  (void)device;
  size_t mask = FDP_ALIGNMENT_BYTES - 1;
  void *taken = NULL;
  /* aligned_alloc wants a multiple of the alignment. Room for no bytes still has an address. */
  if (size_bytes <= SIZE_MAX - mask) {
    size_t rounded = size_bytes > 0 ? (size_bytes + mask) & ~mask : FDP_ALIGNMENT_BYTES;
    taken = aligned_alloc(FDP_ALIGNMENT_BYTES, rounded);
  }
  if (!taken) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no memory for %zu bytes", size_bytes);
  *address = taken;
  return FDP_OK;
}

static void memory_drop(fdp_device *device, void *address) {
  (void)device;
  free(address);
}

/* All host devices are one memory. */
static fdp_status peer_reach(fdp_device *device, fdp_device *peer) {
  assert(peer->ops == device->ops);
  (void)device;
  (void)peer;
  return FDP_OK;
}

static fdp_status make_current(fdp_device *device) {
  (void)device;
  return FDP_OK;
}

static fdp_status stream_open(fdp_device *device, fdp_stream **stream) {
  return host_stream_open(options_of(device), stream);
}

static void stream_close(fdp_device *device, fdp_stream *stream) {
  (void)device;
  host_stream_close(stream);
}

static fdp_status event_open(fdp_device *device, fdp_event **event) {
  (void)device;
  return host_event_open(event);
}

static void event_close(fdp_device *device, fdp_event *event) {
  (void)device;
  host_event_close(event);
}

static fdp_status event_record(fdp_device *device, fdp_event *event, fdp_stream *stream) {
  (void)device;
  return host_event_record(event, stream);
}

static fdp_status stream_wait(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  return host_stream_wait(options_of(device), stream, event);
}

static fdp_status event_query(fdp_device *device, fdp_event *event, bool *passed) {
  (void)device;
  return host_event_query(event, passed);
}

static fdp_status event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                    const volatile int *abort_flag) {
  (void)device;
  return host_event_synchronize(event, timeout_ms, abort_flag);
}

/* --- work --- */

/* One kernel call. In a stream's task the arrays lie behind it: an array is read before the call
 * that enqueued it returns. */
typedef struct host_work {
  enum { WORK_COPY, WORK_COPY_STRIDED, WORK_PACK, WORK_UNPACK, WORK_SUM } kind;
  int32_t count;
  void *target;       /* of a copy; the flat buffer of a pack */
  const void *source; /* of a copy; the flat buffer of an unpack */
  int64_t size_bytes; /* of a copy */
  const void *items;  /* `count` of the kind's own struct */
} host_work;

static fdp_status work_run(const host_work *work) {
  static const char *const names[] = {"copy", "copy_strided", "pack", "unpack", "sum"};
  int code = 0;
  switch (work->kind) {
    case WORK_COPY:
      if (work->size_bytes > 0) memmove(work->target, work->source, (size_t)work->size_bytes);
      break;
    case WORK_COPY_STRIDED: code = fdp_ref_copy_strided(work->items, work->count, NULL); break;
    case WORK_PACK: code = fdp_ref_pack(work->target, work->items, work->count, NULL); break;
    case WORK_UNPACK: code = fdp_ref_unpack(work->source, work->items, work->count, NULL); break;
    case WORK_SUM: code = fdp_ref_sum(work->items, work->count, NULL); break;
  }
  if (code == 0) return FDP_OK;
  return fdp_fail(FDP_DEVICE_ERROR, "host: %s failed with code %d", names[work->kind], code);
}

static fdp_status run_work(fdp_stream *stream, void *arguments) {
  if (host_stream_status(stream) != FDP_OK) return FDP_OK;
  return work_run(arguments);
}

static fdp_status work_push(fdp_stream *stream, const host_work *work, size_t item_bytes) {
  size_t items_bytes = (size_t)work->count * item_bytes;
  host_task *task = NULL;
  fdp_status status = host_task_open(run_work, sizeof *work + items_bytes, &task);
  if (status != FDP_OK) return status;
  host_work *kept = (host_work *)(void *)task->arguments;
  *kept = *work;
  kept->items = kept + 1;
  if (items_bytes > 0) memcpy(kept + 1, work->items, items_bytes);
  host_stream_push(stream, task);
  return FDP_OK;
}

static fdp_status copy(fdp_device *device, fdp_stream *stream, void *target, const void *source,
                       int64_t size_bytes) {
  (void)device;
  host_work work = {.kind = WORK_COPY, .target = target, .source = source,
                    .size_bytes = size_bytes};
  return stream ? work_push(stream, &work, 0) : work_run(&work);
}

static fdp_status copy_strided(fdp_device *device, fdp_stream *stream,
                               const fdp_strided_copy *copies, int32_t copy_count) {
  (void)device;
  host_work work = {.kind = WORK_COPY_STRIDED, .items = copies, .count = copy_count};
  return stream ? work_push(stream, &work, sizeof *copies) : work_run(&work);
}

static fdp_status pack(fdp_device *device, fdp_stream *stream, void *flat,
                       const fdp_segment *segments, int32_t segment_count) {
  (void)device;
  host_work work = {.kind = WORK_PACK, .target = flat, .items = segments, .count = segment_count};
  return stream ? work_push(stream, &work, sizeof *segments) : work_run(&work);
}

static fdp_status unpack(fdp_device *device, fdp_stream *stream, const void *flat,
                         const fdp_segment *segments, int32_t segment_count) {
  (void)device;
  host_work work = {.kind = WORK_UNPACK, .source = flat, .items = segments,
                    .count = segment_count};
  return stream ? work_push(stream, &work, sizeof *segments) : work_run(&work);
}

/* A sum points to an array of sources, which has to be kept as well. */
static fdp_status sum_push(fdp_stream *stream, const fdp_sum *sums, int32_t sum_count) {
  size_t source_count = 0;
  for (int32_t i = 0; i < sum_count; ++i) source_count += (size_t)sums[i].source_count;
  size_t sums_bytes = (size_t)sum_count * sizeof *sums;
  host_task *task = NULL;
  fdp_status status = host_task_open(
      run_work, sizeof(host_work) + sums_bytes + source_count * sizeof(void *), &task);
  if (status != FDP_OK) return status;
  host_work *work = (host_work *)(void *)task->arguments;
  fdp_sum *kept_sums = (fdp_sum *)(work + 1);
  const void **kept_sources = (const void **)(kept_sums + sum_count);
  *work = (host_work){.kind = WORK_SUM, .items = kept_sums, .count = sum_count};
  for (int32_t i = 0; i < sum_count; ++i) {
    size_t count = (size_t)sums[i].source_count;
    kept_sums[i] = sums[i];
    kept_sums[i].sources = kept_sources;
    memcpy(kept_sources, sums[i].sources, count * sizeof *kept_sources);
    kept_sources += count;
  }
  host_stream_push(stream, task);
  return FDP_OK;
}

static fdp_status sum(fdp_device *device, fdp_stream *stream, const fdp_sum *sums,
                      int32_t sum_count) {
  (void)device;
  if (stream) return sum_push(stream, sums, sum_count);
  host_work work = {.kind = WORK_SUM, .items = sums, .count = sum_count};
  return work_run(&work);
}

static const fdp_device_ops host_ops = {
    .name = "host",
    .close = device_close,
    .memory_take = memory_take,
    .memory_drop = memory_drop,
    .pinned_take = memory_take,
    .pinned_drop = memory_drop,
    .peer_reach = peer_reach,
    .make_current = make_current,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .event_open = event_open,
    .event_close = event_close,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .copy = copy,
    .copy_strided = copy_strided,
    .pack = pack,
    .unpack = unpack,
    .sum = sum,
};

fdp_status fdp_device_host_open(const fdp_device_host_options *options, fdp_device **device) {
  assert(options->timeout_ms > 0);
  host_device *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no memory for a device");
  opened->base.ops = &host_ops;
  int32_t kind = options->kind ? options->kind : FDP_DEVICE_HOST;
  opened->base.id = (fdp_device_id){kind, options->ordinal};
  opened->options = *options;
  *device = &opened->base;
  return FDP_OK;
}

/* --- functions --- */

typedef struct host_call {
  fdp_status (*run)(void *argument);
  void *argument;
} host_call;

static fdp_status run_call(fdp_stream *stream, void *arguments) {
  const host_call *call = arguments;
  if (host_stream_status(stream) != FDP_OK) return FDP_OK;
  return call->run(call->argument);
}

fdp_status fdp_device_host_enqueue(fdp_device *device, fdp_stream *stream,
                                   fdp_status (*run)(void *argument), void *argument) {
  assert(device->ops == &host_ops);
  (void)device;
  if (!stream) return run(argument);
  host_task *task = NULL;
  fdp_status status = host_task_open(run_call, sizeof(host_call), &task);
  if (status != FDP_OK) return status;
  host_call call = {.run = run, .argument = argument};
  memcpy(task->arguments, &call, sizeof call);
  host_stream_push(stream, task);
  return FDP_OK;
}
