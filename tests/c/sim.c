#include "sim.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "sim_inside.h"

static uint64_t next_random(sim *world) { /* xorshift64* */
  world->random ^= world->random >> 12;
  world->random ^= world->random << 25;
  world->random ^= world->random >> 27;
  return world->random * UINT64_C(0x2545F4914F6CDD1D);
}

sim_operation *sim_push(fdp_stream *stream, sim_kind kind) {
  assert(stream); /* the simulated device has no default stream */
  sim *world = stream->world;
  assert(world->operation_count < SIM_MAX_OPERATIONS);
  sim_operation *operation = &world->operations[world->operation_count++];
  *operation = (sim_operation){.kind = kind, .stream = stream->index, .record = -1};
  memcpy(operation->enqueued, world->host_clock, sizeof operation->enqueued);
  return operation;
}

void sim_clock_merge(int64_t *clock, const int64_t *seen) {
  for (int32_t i = 0; i < SIM_MAX_STREAMS; ++i) {
    if (seen[i] > clock[i]) clock[i] = seen[i];
  }
}

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
  assert(world->stream_count < SIM_MAX_STREAMS);
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
  sim_operation *operation = sim_push(stream, SIM_WORK);
  operation->target = view->data;
  operation->count = value;
  operation->run = run_write;
  sim_touch_view(operation, view, true);
}

void sim_read(fdp_stream *stream, const fdp_view *view) {
  sim_touch_view(sim_push(stream, SIM_WORK), view, false);
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
  sim_clock_merge(clock, operation->enqueued);
  if (operation->kind == SIM_WAIT) {
    sim_clock_merge(clock, world->operations[operation->record].clock);
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
    sim_operation *ready[SIM_MAX_STREAMS];
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
