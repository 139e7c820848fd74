#include "sim.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_inside.h"

void *sim_grow(void *array, size_t item_bytes, int64_t count, int64_t *capacity) {
  if (count < *capacity) return array;
  *capacity = *capacity * 2 + 64;
  return realloc(array, (size_t)*capacity * item_bytes);
}

void sim_clock_merge(sim_clock *clock, const sim_clock *seen) {
  for (int32_t i = 0; i < SIM_CLOCKS; ++i) {
    clock->at[i] = seen->at[i] > clock->at[i] ? seen->at[i] : clock->at[i];
  }
}

/* --- operations --- */

sim_operation *sim_operation_at(sim *world, int64_t number) {
  assert(number >= world->base && number < world->base + world->operation_count);
  return &world->operations[number - world->base];
}

bool sim_has_run(const sim *world, int64_t operation) {
  return operation < world->base || world->operations[operation - world->base].has_run;
}

/* What is over for everybody is mixed in by its numbers alone: addresses differ between runs. */
void sim_trace(sim *world, char kind, int64_t a, int64_t b, int64_t c) {
  const int64_t numbers[] = {kind, a, b, c};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
    world->trace_hash = (world->trace_hash ^ (uint64_t)numbers[i]) * UINT64_C(0x100000001B3);
    world->trace_hash ^= world->trace_hash >> 29;
  }
  if (world->trace_file) {
    fprintf(world->trace_file, "%c %lld %lld %lld\n", kind, (long long)a, (long long)b,
            (long long)c);
  }
}

sim_operation *sim_push(fdp_stream *stream, sim_kind kind, sim_place place) {
  sim *world = stream->world;
  if (stream->is_closed) sim_report(world, "%s on a stream that was closed", place.what);
  world->operations = sim_grow(world->operations, sizeof *world->operations,
                               world->operation_count, &world->operation_capacity);
  int64_t number = world->base + world->operation_count;
  sim_operation *operation = &world->operations[world->operation_count++];
  memset(operation, 0, offsetof(sim_operation, clock));
  operation->kind = kind;
  operation->stream = stream->index;
  operation->record = operation->next = -1;
  operation->device = stream->device ? stream->device->index : -1;
  operation->place = place;
  sim_clock_merge(&stream->clock, &world->threads[world->thread]);
  stream->clock.at[stream->index] += 1;
  operation->clock = stream->clock;
  if (stream->first < 0) {
    stream->first = number;
  } else {
    sim_operation_at(world, stream->last)->next = number;
  }
  stream->last = number;
  sim_trace(world, 'e', number, (int64_t)kind, stream->index);
  return operation;
}

void sim_commit(fdp_stream *stream) { sim_progress(stream->world); }

void sim_run_first(sim *world, fdp_stream *stream) {
  sim_operation *operation = sim_operation_at(world, stream->first);
  sim_trace(world, 'r', stream->first, 0, 0);
  if (operation->run) operation->run(operation);
  free(operation->items);
  operation->items = NULL;
  operation->has_run = true;
  stream->first = operation->next;
}

/* --- the world --- */

sim *sim_open(uint64_t seed) {
  sim *world = calloc(1, sizeof *world);
  world->trace_hash = UINT64_C(0xCBF29CE484222325);
  sim_set_policy(world, SIM_LATE, seed);
  return world;
}

void sim_close(sim *world) {
  for (int64_t i = 0; i < world->operation_count; ++i) free(world->operations[i].items);
  sim_memory_close(world);
  free(world->stacks);
  free(world->operations);
  free(world);
}

void sim_run(sim *world) {
  for (int32_t s = 0; s < world->stream_count; ++s) {
    fdp_stream *stream = &world->streams[s];
    if (stream->first >= 0 && !sim_run_until(world, stream->last)) continue;
    sim_clock_merge(&world->threads[world->thread], &stream->clock);
  }
}

void sim_retire(sim *world) {
  assert(!world->stalled);
  sim_run(world);
  sim_clock *all = &world->threads[world->thread];
  for (int32_t t = 0; t < SIM_MAX_THREADS; ++t) sim_clock_merge(all, &world->threads[t]);
  for (int32_t t = 0; t < SIM_MAX_THREADS; ++t) world->threads[t] = *all;
  for (int32_t s = 0; s < world->stream_count; ++s) world->streams[s].clock = *all;
  world->base += world->operation_count;
  world->operation_count = 0;
  world->stack_count = 0;
  world->turn_count = 0;
  sim_memory_forget(world);
}

/* --- devices and streams --- */

fdp_device *sim_device(sim *world, int32_t kind, int32_t ordinal) {
  assert(world->device_count < SIM_MAX_DEVICES);
  sim_backend *backend = calloc(1, sizeof *backend);
  backend->base.ops = kind == FDP_DEVICE_HOST ? &sim_host_ops : &sim_gpu_ops;
  backend->base.id = (fdp_device_id){kind, ordinal};
  backend->world = world;
  backend->index = world->device_count;
  world->are_hosts[backend->index] = kind == FDP_DEVICE_HOST;
  world->devices[world->device_count++] = backend;
  return &backend->base;
}

int32_t sim_open_count(const sim *world) {
  int32_t count = sim_memory_live_count(world, SIM_MAX_DEVICES);
  for (int32_t d = 0; d < world->device_count; ++d) count += world->devices[d] != NULL;
  return count;
}

fdp_stream *sim_stream(sim *world) {
  fdp_stream *stream = NULL;
  for (int32_t s = 0; s < world->stream_count && !stream; ++s) {
    if (world->streams[s].is_closed) stream = &world->streams[s];
  }
  if (!stream) {
    assert(world->stream_count < SIM_MAX_STREAMS);
    stream = &world->streams[world->stream_count];
    stream->index = world->stream_count++;
    stream->world = world;
  }
  stream->is_closed = false;
  stream->device = NULL;
  stream->first = stream->last = -1;
  stream->priority = sim_random(world);
  return stream;
}

void sim_forbid_peer(fdp_device *device, fdp_device *peer) {
  sim_backend *from = (sim_backend *)device, *to = (sim_backend *)peer;
  from->world->forbids[from->index][to->index] = true;
}

/* --- a user's work --- */

typedef struct user_fill {
  fdp_view view;
  unsigned char value;
} user_fill;

static void fill_view(char *start, const fdp_view *view, int32_t dim, unsigned char value) {
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  if (dim == view->ndim) {
    memset(start, value, (size_t)item_bytes);
    return;
  }
  for (int64_t i = 0; i < view->shape[dim]; ++i) {
    fill_view(start + i * view->strides[dim] * item_bytes, view, dim + 1, value);
  }
}

static void run_write(const sim_operation *operation) {
  const user_fill *fill = operation->items;
  fill_view(fill->view.data, &fill->view, 0, fill->value);
}

void sim_write(fdp_stream *stream, const fdp_view *view, unsigned char value) {
  sim_place place = sim_place_of(stream->world, "a user's write", __builtin_return_address(0));
  sim_operation *operation = sim_push(stream, SIM_WORK, place);
  user_fill *fill = malloc(sizeof *fill);
  *fill = (user_fill){*view, value};
  operation->items = fill;
  operation->run = run_write;
  sim_touch_view(operation, stream, view, true);
  sim_commit(stream);
}

void sim_read(fdp_stream *stream, const fdp_view *view) {
  sim_place place = sim_place_of(stream->world, "a user's read", __builtin_return_address(0));
  sim_touch_view(sim_push(stream, SIM_WORK, place), stream, view, false);
  sim_commit(stream);
}

static void run_user(const sim_operation *operation) { operation->user_run(operation->target); }

void sim_work(fdp_device *device, fdp_stream *stream, const char *what, void (*run)(void *argument),
              void *argument, const fdp_view *reads, int32_t read_count, const fdp_view *writes,
              int32_t write_count) {
  sim_place place = sim_place_of(((sim_backend *)device)->world, what, __builtin_return_address(0));
  if (!stream) stream = sim_default_stream(device);
  sim_operation *operation = sim_push(stream, SIM_WORK, place);
  operation->device = ((sim_backend *)device)->index;
  operation->target = argument;
  operation->user_run = run;
  operation->run = run_user;
  for (int32_t i = 0; i < read_count; ++i) sim_touch_view(operation, stream, &reads[i], false);
  for (int32_t i = 0; i < write_count; ++i) sim_touch_view(operation, stream, &writes[i], true);
  sim_commit(stream);
}

void sim_host_access(sim *world, const void *begin, int64_t size_bytes, bool writes) {
  sim_clock *clock = &world->threads[world->thread];
  int32_t actor = SIM_MAX_STREAMS + world->thread;
  sim_place place = sim_place_of(world, writes ? "the host's write" : "the host's read",
                                 __builtin_return_address(0));
  clock->at[actor] += 1;
  sim_touch(world, -1, actor, clock, &place, begin, size_bytes, writes);
}

/* --- faults --- */

void sim_leave_out_wait(sim *world, int32_t nth) { world->left_out = nth; }

int32_t sim_wait_count(const sim *world) { return world->wait_count; }

void sim_fail_call(sim *world, int64_t nth) {
  world->failing_call = nth > 0 ? world->call_count + nth : 0;
  world->has_failed = false;
}

int64_t sim_call_count(const sim *world) { return world->call_count; }

bool sim_call_failed(const sim *world) { return world->has_failed; }

void sim_stall_call(sim *world, int64_t nth) {
  world->stalling_call = nth > 0 ? world->call_count + nth : 0;
}

void sim_resume(sim *world) { world->stalling_call = world->stalled = 0; }

bool sim_is_stalled(const sim *world) { return world->stalled != 0; }

int64_t sim_lost_ms(const sim *world) { return world->lost_ms[world->thread]; }

void sim_spare(sim *world, bool is_on) { world->spared += is_on ? 1 : -1; }
