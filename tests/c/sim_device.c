#include <stdlib.h>
#include <string.h>

#include "sim_inside.h"

static void keep_items(sim_operation *operation, const void *items, size_t size_bytes) {
  operation->items = malloc(size_bytes + 1);
  if (size_bytes > 0) memcpy(operation->items, items, size_bytes);
}

static void touch(sim_operation *operation, const void *begin, int64_t size_bytes, bool writes) {
  if (!begin || size_bytes == 0) return;
  if (operation->access_count > 0) { /* neighbours are one: comparing is what takes the time */
    sim_access *last = &operation->accesses[operation->access_count - 1];
    if (last->end == begin && last->writes == writes) {
      last->end += size_bytes;
      return;
    }
  }
  if (operation->access_count == operation->access_capacity) {
    operation->access_capacity = operation->access_capacity * 2 + 8;
    operation->accesses = realloc(operation->accesses, (size_t)operation->access_capacity *
                                                           sizeof *operation->accesses);
  }
  operation->accesses[operation->access_count++] =
      (sim_access){begin, (const char *)begin + size_bytes, writes};
}

/* Every item of a strided array. */
static void touch_strided(sim_operation *operation, const void *start, int32_t ndim,
                          const int64_t *shape, const int64_t *strides_bytes, int64_t item_bytes,
                          bool writes) {
  if (ndim == 0) {
    touch(operation, start, item_bytes, writes);
    return;
  }
  for (int64_t i = 0; i < shape[0]; ++i) {
    touch_strided(operation, (const char *)start + i * strides_bytes[0], ndim - 1, shape + 1,
                  strides_bytes + 1, item_bytes, writes);
  }
}

void sim_touch_view(sim_operation *operation, const fdp_view *view, bool writes) {
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  int64_t strides_bytes[FDP_MAX_DIMS];
  for (int32_t d = 0; d < view->ndim; ++d) strides_bytes[d] = view->strides[d] * item_bytes;
  touch_strided(operation, view->data, view->ndim, view->shape, strides_bytes, item_bytes, writes);
}

/* --- the table --- */

static void device_close(fdp_device *device) { free(device); }

static fdp_status memory_take(fdp_device *device, size_t size_bytes, void **address) {
  (void)device;
  size_t mask = FDP_ALIGNMENT_BYTES - 1;
  *address = aligned_alloc(FDP_ALIGNMENT_BYTES, (size_bytes + mask + 1) & ~mask);
  return FDP_OK;
}

static void memory_drop(fdp_device *device, void *address) {
  (void)device;
  free(address);
}

static fdp_status peer_reach(fdp_device *device, fdp_device *peer) {
  (void)device;
  (void)peer;
  return FDP_OK;
}

static fdp_status stream_open(fdp_device *device, fdp_stream **stream) {
  *stream = sim_stream(((sim_backend *)device)->world);
  return FDP_OK;
}

/* The next to be opened is the one that was closed: what ran on it comes first, as if the closing
 * thread had waited for it. */
static void stream_close(fdp_device *device, fdp_stream *stream) {
  sim *world = ((sim_backend *)device)->world;
  world->closed_streams[world->closed_count++] = stream;
}

static fdp_status event_open(fdp_device *device, fdp_event **event) {
  (void)device;
  *event = malloc(sizeof **event);
  (*event)->record = -1;
  return FDP_OK;
}

static void event_close(fdp_device *device, fdp_event *event) {
  (void)device;
  free(event);
}

static fdp_status event_record(fdp_device *device, fdp_event *event, fdp_stream *stream) {
  (void)device;
  sim_push(stream, SIM_RECORD);
  event->record = stream->world->operation_count - 1;
  return FDP_OK;
}

static fdp_status stream_wait(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  (void)device;
  if (event->record < 0) return FDP_OK;
  bool is_own = stream->world->operations[event->record].stream == stream->index;
  if (is_own) return FDP_OK; /* it orders nothing */
  if (++stream->world->wait_count == stream->world->left_out) return FDP_OK;
  sim_push(stream, SIM_WAIT)->record = event->record;
  return FDP_OK;
}

/* All that the host enqueues from now on comes after what it saw to be over. */
static fdp_status event_query(fdp_device *device, fdp_event *event, bool *passed) {
  sim *world = ((sim_backend *)device)->world;
  *passed = event->record < 0 || world->operations[event->record].has_run;
  if (*passed && event->record >= 0) {
    sim_clock_merge(world->host_clock, world->operations[event->record].clock);
  }
  return FDP_OK;
}

static fdp_status event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                    const volatile int *abort_flag) {
  bool passed = false;
  (void)timeout_ms;
  (void)abort_flag;
  sim_run(((sim_backend *)device)->world);
  return event_query(device, event, &passed);
}

static void run_copy_strided(const sim_operation *operation) {
  fdp_ref_copy_strided(operation->items, operation->count, NULL);
}

static fdp_status copy_strided(fdp_device *device, fdp_stream *stream,
                               const fdp_strided_copy *copies, int32_t copy_count) {
  (void)device;
  sim_operation *operation = sim_push(stream, SIM_WORK);
  keep_items(operation, copies, (size_t)copy_count * sizeof *copies);
  operation->count = copy_count;
  operation->run = run_copy_strided;
  for (int32_t i = 0; i < copy_count; ++i) {
    const fdp_strided_copy *copy = &copies[i];
    touch_strided(operation, copy->target, copy->ndim, copy->shape, copy->target_strides_bytes,
                  copy->item_bytes, true);
    touch_strided(operation, copy->source, copy->ndim, copy->shape, copy->source_strides_bytes,
                  copy->item_bytes, false);
  }
  return FDP_OK;
}

static fdp_status copy(fdp_device *device, fdp_stream *stream, void *target, const void *source,
                       int64_t size_bytes) {
  fdp_strided_copy whole = {.target = target, .source = source, .item_bytes = size_bytes};
  return copy_strided(device, stream, &whole, 1);
}

static void run_pack(const sim_operation *operation) {
  fdp_ref_pack(operation->target, operation->items, operation->count, NULL);
}

static void run_unpack(const sim_operation *operation) {
  fdp_ref_unpack(operation->source, operation->items, operation->count, NULL);
}

static fdp_status push_segments(fdp_stream *stream, void *target, const void *source,
                                const fdp_segment *segments, int32_t segment_count) {
  sim_operation *operation = sim_push(stream, SIM_WORK);
  keep_items(operation, segments, (size_t)segment_count * sizeof *segments);
  operation->count = segment_count;
  operation->target = target;
  operation->source = source;
  operation->run = target ? run_pack : run_unpack;
  const char *flat = target ? target : source;
  for (int32_t i = 0; i < segment_count; ++i) {
    touch(operation, segments[i].tensor, segments[i].size_bytes, !target);
    touch(operation, flat + segments[i].offset_bytes, segments[i].size_bytes, target != NULL);
  }
  return FDP_OK;
}

static fdp_status pack(fdp_device *device, fdp_stream *stream, void *flat,
                       const fdp_segment *segments, int32_t segment_count) {
  (void)device;
  return push_segments(stream, flat, NULL, segments, segment_count);
}

static fdp_status unpack(fdp_device *device, fdp_stream *stream, const void *flat,
                         const fdp_segment *segments, int32_t segment_count) {
  (void)device;
  return push_segments(stream, NULL, flat, segments, segment_count);
}

static void run_sum(const sim_operation *operation) {
  fdp_ref_sum(operation->items, operation->count, NULL);
}

static fdp_status sum(fdp_device *device, fdp_stream *stream, const fdp_sum *sums,
                      int32_t sum_count) {
  (void)device;
  for (int32_t i = 0; i < sum_count; ++i) { /* one operation each: simple to keep */
    sim_operation *operation = sim_push(stream, SIM_WORK);
    size_t sources_bytes = (size_t)sums[i].source_count * sizeof(void *);
    int64_t size_bytes = sums[i].count_elems * (int64_t)fdp_dtype_bytes(sums[i].dtype);
    fdp_sum *kept = malloc(sizeof *kept + sources_bytes);
    *kept = sums[i];
    kept->sources = memcpy(kept + 1, sums[i].sources, sources_bytes);
    operation->items = kept;
    operation->count = 1;
    operation->run = run_sum;
    touch(operation, sums[i].target, size_bytes, true);
    for (int32_t k = 0; k < sums[i].source_count; ++k) {
      touch(operation, sums[i].sources[k], size_bytes, false);
    }
  }
  return FDP_OK;
}

const fdp_device_ops sim_ops = {
    .name = "sim",
    .close = device_close,
    .memory_take = memory_take,
    .memory_drop = memory_drop,
    .pinned_take = memory_take,
    .pinned_drop = memory_drop,
    .peer_reach = peer_reach,
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
