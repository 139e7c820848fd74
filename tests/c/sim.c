#include "sim.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STREAMS 32
#define MAX_OPERATIONS 4096

typedef struct sim_access {
  const char *begin;
  const char *end;
  bool writes;
} sim_access;

typedef enum sim_kind { SIM_WORK, SIM_RECORD, SIM_WAIT } sim_kind;

typedef struct sim_operation {
  sim_kind kind;
  int32_t stream;
  bool has_run;
  int32_t record; /* of a wait: the operation that it waits for */
  void (*run)(const struct sim_operation *operation);
  void *target; /* of the work; the flat buffer of pack and unpack */
  const void *source;
  int64_t size_bytes;
  void *items; /* own copy of the argument array */
  int32_t count;
  sim_access *accesses;
  int32_t access_count;
  int32_t access_capacity;
  int64_t enqueued[MAX_STREAMS]; /* the host's clock when it was enqueued */
  int64_t clock[MAX_STREAMS];    /* set when it has run */
} sim_operation;

struct fdp_stream {
  sim *world;
  int32_t index;
};

struct fdp_event {
  int32_t record; /* -1: never recorded */
};

typedef struct sim_backend {
  fdp_device base;
  sim *world;
} sim_backend;

struct sim {
  uint64_t random;
  fdp_stream streams[MAX_STREAMS];
  int32_t stream_count;
  fdp_stream *closed_streams[MAX_STREAMS];
  int32_t closed_count;
  int64_t clocks[MAX_STREAMS][MAX_STREAMS]; /* of each stream, as far as it has run */
  int64_t host_clock[MAX_STREAMS]; /* what the host has seen to be over */
  int32_t operation_count;
  int32_t first_waiting; /* all operations before it have run */
  int32_t wait_count;
  int32_t left_out;
  int32_t race_count;
  sim_operation operations[MAX_OPERATIONS];
};

static uint64_t next_random(sim *world) { /* xorshift64* */
  world->random ^= world->random >> 12;
  world->random ^= world->random << 25;
  world->random ^= world->random >> 27;
  return world->random * UINT64_C(0x2545F4914F6CDD1D);
}

static sim_operation *push(fdp_stream *stream, sim_kind kind) {
  assert(stream); /* the simulated device has no default stream */
  sim *world = stream->world;
  assert(world->operation_count < MAX_OPERATIONS);
  sim_operation *operation = &world->operations[world->operation_count++];
  *operation = (sim_operation){.kind = kind, .stream = stream->index, .record = -1};
  memcpy(operation->enqueued, world->host_clock, sizeof operation->enqueued);
  return operation;
}

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

static void touch_view(sim_operation *operation, const fdp_view *view, bool writes) {
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
  push(stream, SIM_RECORD);
  event->record = stream->world->operation_count - 1;
  return FDP_OK;
}

static fdp_status stream_wait(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  (void)device;
  if (event->record < 0) return FDP_OK;
  bool is_own = stream->world->operations[event->record].stream == stream->index;
  if (is_own) return FDP_OK; /* it orders nothing */
  if (++stream->world->wait_count == stream->world->left_out) return FDP_OK;
  push(stream, SIM_WAIT)->record = event->record;
  return FDP_OK;
}

static void clock_merge(int64_t *clock, const int64_t *seen) {
  for (int32_t i = 0; i < MAX_STREAMS; ++i) {
    if (seen[i] > clock[i]) clock[i] = seen[i];
  }
}

/* All that the host enqueues from now on comes after what it saw to be over. */
static fdp_status event_query(fdp_device *device, fdp_event *event, bool *passed) {
  sim *world = ((sim_backend *)device)->world;
  *passed = event->record < 0 || world->operations[event->record].has_run;
  if (*passed && event->record >= 0) {
    clock_merge(world->host_clock, world->operations[event->record].clock);
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
  sim_operation *operation = push(stream, SIM_WORK);
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
  sim_operation *operation = push(stream, SIM_WORK);
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
    sim_operation *operation = push(stream, SIM_WORK);
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

static const fdp_device_ops sim_ops = {
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

/* --- the world --- */

sim *sim_open(uint64_t seed) {
  sim *world = calloc(1, sizeof *world);
  world->random = seed * 2 + 1;
  return world;
}

void sim_close(sim *world) {
  for (int32_t i = 0; i < world->operation_count; ++i) {
    free(world->operations[i].items);
    free(world->operations[i].accesses);
  }
  free(world);
}

fdp_device *sim_device(sim *world, int32_t kind, int32_t ordinal) {
  sim_backend *backend = calloc(1, sizeof *backend);
  backend->base.ops = &sim_ops;
  backend->base.id = (fdp_device_id){kind, ordinal};
  backend->world = world;
  return &backend->base;
}

fdp_stream *sim_stream(sim *world) {
  if (world->closed_count > 0) return world->closed_streams[--world->closed_count];
  assert(world->stream_count < MAX_STREAMS);
  fdp_stream *stream = &world->streams[world->stream_count];
  *stream = (fdp_stream){world, world->stream_count++};
  return stream;
}

static void run_write(const sim_operation *operation) {
  for (int32_t i = 0; i < operation->access_count; ++i) {
    const sim_access *access = &operation->accesses[i];
    memset((void *)(uintptr_t)access->begin, operation->count,
           (size_t)(access->end - access->begin));
  }
}

void sim_write(fdp_stream *stream, const fdp_view *view, unsigned char value) {
  sim_operation *operation = push(stream, SIM_WORK);
  operation->target = view->data;
  operation->count = value;
  operation->run = run_write;
  touch_view(operation, view, true);
}

void sim_read(fdp_stream *stream, const fdp_view *view) {
  touch_view(push(stream, SIM_WORK), view, false);
}

void sim_leave_out_wait(sim *world, int32_t nth) { world->left_out = nth; }

int32_t sim_wait_count(const sim *world) { return world->wait_count; }

int32_t sim_race_count(const sim *world) { return world->race_count; }

static bool touch_same(const sim_operation *a, const sim_operation *b) {
  for (int32_t i = 0; i < a->access_count; ++i) {
    for (int32_t k = 0; k < b->access_count; ++k) {
      const sim_access *x = &a->accesses[i];
      const sim_access *y = &b->accesses[k];
      if ((x->writes || y->writes) && x->begin < y->end && y->begin < x->end) return true;
    }
  }
  return false;
}

static void run_operation(sim *world, sim_operation *operation) {
  int64_t *clock = world->clocks[operation->stream];
  clock_merge(clock, operation->enqueued);
  if (operation->kind == SIM_WAIT) {
    clock_merge(clock, world->operations[operation->record].clock);
  }
  clock[operation->stream] += 1;
  memcpy(operation->clock, clock, sizeof operation->clock);
  for (int32_t i = 0; i < world->operation_count && operation->kind == SIM_WORK; ++i) {
    const sim_operation *other = &world->operations[i];
    if (!other->has_run || other->kind != SIM_WORK) continue;
    bool is_ordered = clock[other->stream] >= other->clock[other->stream];
    if (!is_ordered && touch_same(operation, other)) world->race_count += 1;
  }
  if (operation->run) operation->run(operation);
  operation->has_run = true;
}

/* The first operation of the stream that has not run, if it may run now. */
static sim_operation *ready_operation(sim *world, int32_t stream) {
  for (int32_t i = world->first_waiting; i < world->operation_count; ++i) {
    sim_operation *operation = &world->operations[i];
    if (operation->has_run || operation->stream != stream) continue;
    bool blocked =
        operation->kind == SIM_WAIT && !world->operations[operation->record].has_run;
    return blocked ? NULL : operation;
  }
  return NULL;
}

void sim_run(sim *world) {
  for (;;) {
    sim_operation *ready[MAX_STREAMS];
    uint64_t ready_count = 0;
    for (int32_t s = 0; s < world->stream_count; ++s) {
      sim_operation *operation = ready_operation(world, s);
      if (operation) ready[ready_count++] = operation;
    }
    if (ready_count == 0) break;
    run_operation(world, ready[next_random(world) % ready_count]);
    while (world->first_waiting < world->operation_count &&
           world->operations[world->first_waiting].has_run) {
      world->first_waiting += 1;
    }
  }
  assert(world->first_waiting == world->operation_count); /* records come before their waits */
}
