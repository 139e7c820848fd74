#include <stdlib.h>
#include <string.h>

#include "sim_inside.h"

#define HERE __builtin_return_address(0)

static sim_backend *backend_of(fdp_device *device) { return (sim_backend *)device; }

static bool is_host(const fdp_device *device) { return device->id.kind == FDP_DEVICE_HOST; }

/* Every call that can fail comes through here first. */
static fdp_status arrive(fdp_device *device, const char *call) {
  sim *world = backend_of(device)->world;
  if (world->spared > 0) return FDP_OK;
  if (world->yield) world->yield(world);
  ++world->call_count;
  if (world->stalling_call > 0 && world->call_count >= world->stalling_call && !is_host(device)) {
    world->stalling_call = 0;
    world->stalled = backend_of(device)->index + 1;
    sim_trace(world, 's', world->call_count, world->stalled, 0);
  }
  if (world->call_count != world->failing_call) return FDP_OK;
  world->has_failed = true;
  sim_trace(world, 'f', world->call_count, 0, 0);
  return fdp_fail(FDP_DEVICE_ERROR, "sim: call %lld, %s, was told to fail",
                  (long long)world->call_count, call);
}

fdp_stream *sim_default_stream(fdp_device *device) {
  sim_backend *backend = backend_of(device);
  fdp_stream **standard = &backend->standard[is_host(device) ? backend->world->thread : 0];
  if (!*standard) {
    *standard = sim_stream(backend->world);
    (*standard)->device = backend;
  }
  return *standard;
}

/* The stream itself, or the device's own in place of NULL. */
static fdp_stream *stream_of(fdp_device *device, fdp_stream *stream, const char *call) {
  sim_backend *backend = backend_of(device);
  if (stream) {
    if (stream->device && stream->device != backend) {
      sim_report(backend->world, "%s by device %d on a stream of device %d", call, backend->index,
                 stream->device->index);
    }
    return stream;
  }
  return sim_default_stream(device);
}

static bool runs_at_once(const fdp_device *device, const fdp_stream *stream) {
  return !stream && is_host(device);
}

/* --- work --- */

static sim_operation *begin(fdp_device *device, fdp_stream *stream, const char *what,
                            const void *site) {
  sim *world = backend_of(device)->world;
  sim_operation *operation = sim_push(stream, SIM_WORK, sim_place_of(world, what, site));
  operation->device = backend_of(device)->index;
  return operation;
}

/* What the host does at once comes after all that it did and saw, and it has seen the end of it. */
static void finish(fdp_device *device, fdp_stream *given, fdp_stream *stream) {
  sim *world = backend_of(device)->world;
  if (runs_at_once(device, given)) {
    sim_run_until(world, stream->last);
    sim_clock_merge(&world->threads[world->thread], &stream->clock);
  } else {
    sim_commit(stream);
  }
}

static void keep_items(sim_operation *operation, const void *items, size_t size_bytes) {
  operation->items = malloc(size_bytes + 1);
  if (size_bytes > 0) memcpy(operation->items, items, size_bytes);
}

static void run_copy_strided(const sim_operation *operation) {
  fdp_ref_copy_strided(operation->items, operation->count, NULL);
}

static fdp_status push_copies(fdp_device *device, fdp_stream *given, const char *what,
                              const fdp_strided_copy *copies, int32_t copy_count,
                              const void *site) {
  fdp_status status = arrive(device, what);
  if (status != FDP_OK) return status;
  fdp_stream *stream = stream_of(device, given, what);
  sim_operation *operation = begin(device, stream, what, site);
  keep_items(operation, copies, (size_t)copy_count * sizeof *copies);
  operation->count = copy_count;
  operation->run = run_copy_strided;
  for (int32_t i = 0; i < copy_count; ++i) {
    const fdp_strided_copy *copy = &copies[i];
    sim_touch_strided(operation, stream, copy->target, copy->ndim, copy->shape,
                      copy->target_strides_bytes, copy->item_bytes, true);
    sim_touch_strided(operation, stream, copy->source, copy->ndim, copy->shape,
                      copy->source_strides_bytes, copy->item_bytes, false);
  }
  finish(device, given, stream);
  return FDP_OK;
}

static fdp_status copy_strided(fdp_device *device, fdp_stream *stream,
                               const fdp_strided_copy *copies, int32_t copy_count) {
  return push_copies(device, stream, "copy_strided", copies, copy_count, HERE);
}

static void check_default_stream(fdp_device *device, const void *address, const void *site) {
  sim *world = backend_of(device)->world;
  int32_t owner = sim_memory_owner(world, address);
  if (owner < 0 || owner == backend_of(device)->index || world->are_hosts[owner]) return;
  sim_place place = sim_place_of(world, "copy", site);
  sim_report(world, "copy (%s %d) @%p: between devices %d and %d on a default stream", place.note,
             place.number, site, backend_of(device)->index, owner);
}

static fdp_status copy(fdp_device *device, fdp_stream *stream, void *target, const void *source,
                       int64_t size_bytes) {
  if (!stream && !is_host(device)) {
    check_default_stream(device, target, HERE);
    check_default_stream(device, source, HERE);
  }
  fdp_strided_copy whole = {.target = target, .source = source, .item_bytes = size_bytes};
  return push_copies(device, stream, "copy", &whole, 1, HERE);
}

static void run_pack(const sim_operation *operation) {
  fdp_ref_pack(operation->target, operation->items, operation->count, NULL);
}

static void run_unpack(const sim_operation *operation) {
  fdp_ref_unpack(operation->source, operation->items, operation->count, NULL);
}

static fdp_status push_segments(fdp_device *device, fdp_stream *given, void *target,
                                const void *source, const fdp_segment *segments,
                                int32_t segment_count, const void *site) {
  const char *what = target ? "pack" : "unpack";
  fdp_status status = arrive(device, what);
  if (status != FDP_OK) return status;
  fdp_stream *stream = stream_of(device, given, what);
  sim_operation *operation = begin(device, stream, what, site);
  keep_items(operation, segments, (size_t)segment_count * sizeof *segments);
  operation->count = segment_count;
  operation->target = target;
  operation->source = source;
  operation->run = target ? run_pack : run_unpack;
  const char *flat = target ? target : source;
  for (int32_t i = 0; i < segment_count; ++i) {
    const fdp_segment *segment = &segments[i];
    sim_touch_operation(operation, stream, segment->tensor, segment->size_bytes, !target);
    if (!target && !segment->tensor) continue; /* unpack skips it */
    sim_touch_operation(operation, stream, flat + segment->offset_bytes, segment->size_bytes,
                        target != NULL);
  }
  finish(device, given, stream);
  return FDP_OK;
}

static fdp_status pack(fdp_device *device, fdp_stream *stream, void *flat,
                       const fdp_segment *segments, int32_t segment_count) {
  return push_segments(device, stream, flat, NULL, segments, segment_count, HERE);
}

static fdp_status unpack(fdp_device *device, fdp_stream *stream, const void *flat,
                         const fdp_segment *segments, int32_t segment_count) {
  return push_segments(device, stream, NULL, flat, segments, segment_count, HERE);
}

static void run_sum(const sim_operation *operation) {
  fdp_ref_sum(operation->items, operation->count, NULL);
}

static fdp_status sum(fdp_device *device, fdp_stream *given, const fdp_sum *sums,
                      int32_t sum_count) {
  const void *site = HERE;
  fdp_status status = arrive(device, "sum");
  if (status != FDP_OK) return status;
  fdp_stream *stream = stream_of(device, given, "sum");
  for (int32_t i = 0; i < sum_count; ++i) { /* one operation each: simple to keep */
    sim_operation *operation = begin(device, stream, "sum", site);
    size_t sources_bytes = (size_t)sums[i].source_count * sizeof(void *);
    int64_t size_bytes = sums[i].count_elems * (int64_t)fdp_dtype_bytes(sums[i].dtype);
    fdp_sum *kept = malloc(sizeof *kept + sources_bytes);
    *kept = sums[i];
    kept->sources = memcpy(kept + 1, sums[i].sources, sources_bytes);
    operation->items = kept;
    operation->count = 1;
    operation->run = run_sum;
    for (int32_t k = 0; k < sums[i].source_count; ++k) {
      sim_touch_operation(operation, stream, sums[i].sources[k], size_bytes, false);
    }
    sim_touch_operation(operation, stream, sums[i].target, size_bytes, true);
    finish(device, given, stream);
  }
  return FDP_OK;
}

/* --- memory --- */

static fdp_status take(fdp_device *device, int32_t arena, size_t size_bytes, void **address,
                       const char *call) {
  sim *world = backend_of(device)->world;
  fdp_status status = arrive(device, call);
  bool is_full = backend_of(device)->is_full && arena < SIM_MAX_DEVICES;
  if (status != FDP_OK || is_full) return fdp_fail(FDP_OUT_OF_MEMORY, "sim: no memory");
  *address = sim_memory_take(world, arena, (int64_t)size_bytes);
  return *address ? FDP_OK : fdp_fail(FDP_OUT_OF_MEMORY, "sim: the device is full");
}

static fdp_status memory_take(fdp_device *device, size_t size_bytes, void **address) {
  return take(device, backend_of(device)->index, size_bytes, address, "memory_take");
}

static fdp_status pinned_take(fdp_device *device, size_t size_bytes, void **address) {
  return take(device, SIM_MAX_DEVICES, size_bytes, address, "pinned_take");
}

static void memory_drop(fdp_device *device, void *address) {
  backend_of(device)->is_full = false;
  sim *world = backend_of(device)->world;
  sim_memory_drop(world, backend_of(device)->index, address,
                  sim_place_of(world, "memory_drop", HERE));
}

static void pinned_drop(fdp_device *device, void *address) {
  sim *world = backend_of(device)->world;
  sim_memory_drop(world, SIM_MAX_DEVICES, address, sim_place_of(world, "pinned_drop", HERE));
}

static fdp_status peer_reach(fdp_device *device, fdp_device *peer) {
  sim_backend *from = backend_of(device), *to = backend_of(peer);
  if (from->world->forbids[from->index][to->index]) {
    return fdp_fail(FDP_UNSUPPORTED, "sim: device %d does not reach device %d", from->index,
                    to->index);
  }
  from->world->reaches[from->index][to->index] = true;
  return FDP_OK;
}

void sim_fill_device(fdp_device *device) { backend_of(device)->is_full = true; }

/* --- streams and events --- */

static void device_close(fdp_device *device) {
  sim_backend *backend = backend_of(device);
  sim *world = backend->world;
  int32_t memories = sim_memory_live_count(world, backend->index);
  if (backend->open_streams + backend->open_events + memories > 0) {
    sim_report(world, "device %d was closed with %d streams, %d events and %d blocks of memory",
               backend->index, backend->open_streams, backend->open_events, memories);
  }
  world->devices[backend->index] = NULL;
  for (int32_t s = 0; s < world->stream_count; ++s) {
    if (world->streams[s].device == backend) world->streams[s].device = NULL;
  }
  free(device);
}

static fdp_status stream_open(fdp_device *device, fdp_stream **stream) {
  fdp_status status = arrive(device, "stream_open");
  if (status != FDP_OK) return status;
  *stream = sim_stream(backend_of(device)->world);
  (*stream)->device = backend_of(device);
  backend_of(device)->open_streams += 1;
  return FDP_OK;
}

/* The calling thread waits for what is enqueued. The next stream to be opened is this one. */
static void stream_close(fdp_device *device, fdp_stream *stream) {
  sim *world = backend_of(device)->world;
  if (stream->first < 0 || sim_run_until(world, stream->last)) {
    sim_clock_merge(&world->threads[world->thread], &stream->clock);
  } else {
    sim_report(world, "a stream of a device that never finishes was closed");
  }
  if (stream->device) backend_of(device)->open_streams -= 1;
  stream->is_closed = true;
}

static fdp_status event_open(fdp_device *device, fdp_event **event) {
  fdp_status status = arrive(device, "event_open");
  if (status != FDP_OK) return status;
  *event = calloc(1, sizeof **event);
  (*event)->device = backend_of(device);
  (*event)->record = -1;
  backend_of(device)->open_events += 1;
  return FDP_OK;
}

static void event_close(fdp_device *device, fdp_event *event) {
  if (!event) return;
  if (event->device != backend_of(device)) {
    sim_report(backend_of(device)->world, "an event was closed by another device than its own");
  }
  event->device->open_events -= 1;
  free(event);
}

static fdp_status event_record(fdp_device *device, fdp_event *event, fdp_stream *given) {
  fdp_status status = arrive(device, "event_record");
  if (status != FDP_OK) return status;
  fdp_stream *stream = stream_of(device, given, "event_record");
  sim *world = stream->world;
  if (event->device != backend_of(device)) {
    sim_report(world, "an event was recorded by another device than its own");
  }
  sim_operation *operation = sim_push(stream, SIM_RECORD, sim_place_of(world, "record", HERE));
  event->record = world->base + world->operation_count - 1;
  event->clock = operation->clock;
  finish(device, given, stream);
  return FDP_OK;
}

static fdp_status stream_wait(fdp_device *device, fdp_stream *given, fdp_event *event) {
  fdp_status status = arrive(device, "stream_wait");
  if (status != FDP_OK) return status;
  fdp_stream *stream = stream_of(device, given, "stream_wait");
  sim *world = stream->world;
  if (event->record < world->base) return FDP_OK; /* never recorded, or over for everybody */
  if (sim_operation_at(world, event->record)->stream == stream->index) return FDP_OK;
  if (++world->wait_count == world->left_out) return FDP_OK;
  sim_clock_merge(&stream->clock, &event->clock);
  sim_push(stream, SIM_WAIT, sim_place_of(world, "wait", HERE))->record = event->record;
  finish(device, given, stream);
  return FDP_OK;
}

/* All that the host does from now on comes after what it saw to be over. */
static void see(sim *world, const fdp_event *event) {
  if (event->record >= 0) sim_clock_merge(&world->threads[world->thread], &event->clock);
}

static fdp_status event_query(fdp_device *device, fdp_event *event, bool *passed) {
  sim *world = backend_of(device)->world;
  *passed = event->record < 0 || sim_has_run(world, event->record);
  sim_trace(world, 'q', event->record, *passed, 0);
  if (*passed) see(world, event);
  return FDP_OK;
}

static fdp_status event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                    const volatile int *abort_flag) {
  sim *world = backend_of(device)->world;
  (void)abort_flag;
  fdp_status status = arrive(device, "event_synchronize");
  if (status != FDP_OK) return status;
  if (event->record >= 0 && !sim_run_until(world, event->record)) {
    world->lost_ms[world->thread] += timeout_ms;
    return fdp_fail(FDP_TIMED_OUT, "sim: device %d: event_synchronize: not done within %lld ms",
                    backend_of(device)->index, (long long)timeout_ms);
  }
  see(world, event);
  return FDP_OK;
}

#define SIM_OPS                                                                                 \
  .close = device_close, .memory_take = memory_take, .memory_drop = memory_drop,                \
  .pinned_take = pinned_take, .pinned_drop = pinned_drop, .peer_reach = peer_reach,             \
  .stream_open = stream_open, .stream_close = stream_close, .event_open = event_open,           \
  .event_close = event_close, .event_record = event_record, .stream_wait = stream_wait,         \
  .event_query = event_query, .event_synchronize = event_synchronize, .copy = copy,             \
  .copy_strided = copy_strided, .pack = pack, .unpack = unpack, .sum = sum

const fdp_device_ops sim_gpu_ops = {.name = "sim", SIM_OPS};
/* Another backend: no stream of one waits for an event of the other. */
const fdp_device_ops sim_host_ops = {.name = "sim host", SIM_OPS};
