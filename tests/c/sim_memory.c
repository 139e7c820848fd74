/* Memory of the simulated devices, and the record of who touched which bytes of it. An access that
 * a later one covers and is ordered before is forgotten: whatever is unordered with the first is
 * unordered with the second, or comes after both. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_inside.h"

#define ARENA_BYTES (INT64_C(1) << 28)
#define POISON 0xFF /* NaN in every float type */

static sim_block *find_block(const sim_arena *arena, const char *address) {
  int32_t low = 0, high = arena->count;
  while (low < high) { /* the first block that begins after the address */
    int32_t middle = low + (high - low) / 2;
    if (arena->blocks[middle].begin <= address) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > 0 ? &arena->blocks[low - 1] : NULL;
}

/* The one dropped last is the first to be taken again. */
static sim_block *find_free(sim_arena *arena, int64_t size_bytes) {
  for (int32_t i = arena->count - 1; i >= 0; --i) {
    sim_block *block = &arena->blocks[i];
    if (!block->is_live && block->size_bytes == size_bytes) return block;
  }
  return NULL;
}

void *sim_memory_take(sim *world, int32_t index, int64_t size_bytes) {
  sim_arena *arena = &world->arenas[index];
  sim_block *block = find_free(arena, size_bytes);
  if (!arena->base) {
    arena->base = mmap(NULL, (size_t)ARENA_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena->base == MAP_FAILED) abort();
  }
  if (!block) {
    int64_t mask = FDP_ALIGNMENT_BYTES - 1;
    int64_t room_bytes = ((size_bytes + mask) & ~mask) + FDP_ALIGNMENT_BYTES; /* a gap */
    int64_t capacity = arena->capacity;
    if (arena->used_bytes + room_bytes > ARENA_BYTES) return NULL;
    arena->blocks = sim_grow(arena->blocks, sizeof *arena->blocks, arena->count, &capacity);
    arena->capacity = (int32_t)capacity;
    block = &arena->blocks[arena->count++];
    *block = (sim_block){.begin = arena->base + arena->used_bytes, .size_bytes = size_bytes};
    arena->used_bytes += room_bytes;
  }
  block->is_live = true;
  memset(block->begin, POISON, (size_t)size_bytes);
  sim_clock_merge(&world->threads[world->thread], &world->allocator);
  sim_trace(world, 'm', index, block->begin - arena->base, size_bytes);
  return block->begin;
}

/* All that was enqueued on it has to be over for the thread that drops it. */
void sim_memory_drop(sim *world, int32_t index, void *address, sim_place place) {
  sim_arena *arena = &world->arenas[index];
  sim_block *block = find_block(arena, address);
  if (!block || block->begin != address || !block->is_live) {
    sim_report(world, "memory that was not taken is dropped");
    return;
  }
  sim_clock *clock = &world->threads[world->thread];
  int32_t actor = SIM_MAX_STREAMS + world->thread;
  clock->at[actor] += 1;
  sim_touch(world, -1, actor, clock, &place, address, block->size_bytes, true);
  sim_clock_merge(&world->allocator, clock);
  block->is_live = false;
  memset(block->begin, POISON, (size_t)block->size_bytes);
  sim_trace(world, 'd', index, block->begin - arena->base, 0);
}

int32_t sim_memory_live_count(const sim *world, int32_t index) {
  int32_t count = 0;
  for (int32_t i = 0; i < world->arenas[index].count; ++i) {
    count += world->arenas[index].blocks[i].is_live;
  }
  return count;
}

void sim_memory_forget(sim *world) {
  for (int32_t i = 0; i <= SIM_MAX_DEVICES; ++i) {
    for (int32_t k = 0; k < world->arenas[i].count; ++k) world->arenas[i].blocks[k].log.count = 0;
  }
  world->foreign.count = 0;
}

void sim_memory_close(sim *world) {
  for (int32_t i = 0; i <= SIM_MAX_DEVICES; ++i) {
    sim_arena *arena = &world->arenas[i];
    for (int32_t k = 0; k < arena->count; ++k) free(arena->blocks[k].log.accesses);
    free(arena->blocks);
    if (arena->base) munmap(arena->base, (size_t)ARENA_BYTES);
  }
  free(world->foreign.accesses);
}

void sim_own(fdp_device *device, const void *begin, int64_t size_bytes) {
  sim *world = ((sim_backend *)device)->world;
  assert(world->area_count < SIM_MAX_AREAS);
  world->areas[world->area_count++] =
      (sim_area){begin, (const char *)begin + size_bytes, ((sim_backend *)device)->index};
}

int32_t sim_memory_owner(const sim *world, const void *address) {
  const char *at = address;
  for (int32_t i = 0; i < SIM_MAX_DEVICES; ++i) {
    const char *base = world->arenas[i].base;
    if (base && at >= base && at < base + ARENA_BYTES) return i;
  }
  for (int32_t i = 0; i < world->area_count; ++i) {
    if (at >= world->areas[i].begin && at < world->areas[i].end) return world->areas[i].device;
  }
  return -1;
}

/* --- accesses --- */

static const char *kind_of(const sim_access *access) { return access->writes ? "writes" : "reads"; }

static void report_conflict(sim *world, const sim_access *a, const sim_access *b) {
  sim_report(world,
             "no order between two accesses: %s (%s %d) %s %lld bytes @%p, and %s (%s %d) %s %lld "
             "bytes @%p [stacks %d and %d]",
             a->place.what, a->place.note, a->place.number, kind_of(a),
             (long long)(a->end - a->begin), a->place.site, b->place.what, b->place.note,
             b->place.number, kind_of(b), (long long)(b->end - b->begin), b->place.site,
             a->place.stack, b->place.stack);
}

static void log_access(sim *world, sim_log *log, const sim_access *access, const sim_clock *clock) {
  int32_t kept = 0;
  bool is_known = false;
  for (int32_t i = 0; i < log->count; ++i) {
    sim_access *other = &log->accesses[i];
    bool meets = other->begin < access->end && access->begin < other->end;
    if (meets) {
      bool is_ordered = clock->at[other->actor] >= other->step;
      if (!is_ordered && (access->writes || other->writes)) report_conflict(world, other, access);
      bool covers = access->begin <= other->begin && other->end <= access->end;
      bool replaces = access->writes || (!other->writes && other->actor == access->actor);
      if (is_ordered && covers && replaces) continue;
      bool is_same = other->actor == access->actor && other->step == access->step;
      if (is_same && other->writes >= access->writes && other->begin <= access->begin &&
          access->end <= other->end) {
        is_known = true;
      }
    }
    if (kept != i) log->accesses[kept] = *other;
    ++kept;
  }
  log->count = kept;
  if (is_known) return;
  int64_t capacity = log->capacity;
  log->accesses = sim_grow(log->accesses, sizeof *log->accesses, log->count, &capacity);
  log->capacity = (int32_t)capacity;
  log->accesses[log->count++] = *access;
}

/* The host's memory is everybody's. */
static bool reaches(const sim *world, int32_t device, int32_t arena) {
  return arena == SIM_MAX_DEVICES || world->are_hosts[arena] || world->reaches[device][arena];
}

static sim_log *log_of(sim *world, int32_t device, const sim_access *access) {
  for (int32_t i = 0; i <= SIM_MAX_DEVICES; ++i) {
    sim_arena *arena = &world->arenas[i];
    if (!arena->base || access->begin < arena->base || access->begin >= arena->base + ARENA_BYTES) {
      continue;
    }
    const sim_place *place = &access->place;
    sim_block *block = find_block(arena, access->begin);
    if (!block || access->end > block->begin + block->size_bytes) {
      sim_report(world, "%s (%s %d) @%p %s %lld bytes that are in no block of memory", place->what,
                 place->note, place->number, place->site, kind_of(access),
                 (long long)(access->end - access->begin));
      return NULL;
    }
    if (!block->is_live) {
      sim_report(world, "%s (%s %d) @%p %s memory that was given back", place->what, place->note,
                 place->number, place->site, kind_of(access));
      return NULL;
    }
    if (device >= 0 && i != device && !reaches(world, device, i)) {
      sim_report(world, "%s (%s %d) @%p: device %d was not let into device %d", place->what,
                 place->note, place->number, place->site, device, i);
    }
    return &block->log;
  }
  return &world->foreign;
}

void sim_touch(sim *world, int32_t device, int32_t actor, const sim_clock *clock,
               const sim_place *place, const void *begin, int64_t size_bytes, bool writes) {
  if (!begin || size_bytes == 0) return;
  sim_access access = {begin, (const char *)begin + size_bytes, writes, actor, clock->at[actor],
                       *place};
  sim_log *log = log_of(world, device, &access);
  if (log) log_access(world, log, &access, clock);
}

void sim_touch_operation(sim_operation *operation, fdp_stream *stream, const void *begin,
                         int64_t size_bytes, bool writes) {
  sim_touch(stream->world, operation->device, stream->index, &operation->clock, &operation->place,
            begin, size_bytes, writes);
}

void sim_touch_strided(sim_operation *operation, fdp_stream *stream, const void *start,
                       int32_t ndim, const int64_t *shape, const int64_t *strides_bytes,
                       int64_t item_bytes, bool writes) {
  if (ndim > 0 && strides_bytes[ndim - 1] == item_bytes) { /* neighbours are one */
    sim_touch_strided(operation, stream, start, ndim - 1, shape, strides_bytes,
                      item_bytes * shape[ndim - 1], writes);
    return;
  }
  if (ndim == 0) {
    sim_touch_operation(operation, stream, start, item_bytes, writes);
    return;
  }
  for (int64_t i = 0; i < shape[0]; ++i) {
    sim_touch_strided(operation, stream, (const char *)start + i * strides_bytes[0], ndim - 1,
                      shape + 1, strides_bytes + 1, item_bytes, writes);
  }
}

void sim_touch_view(sim_operation *operation, fdp_stream *stream, const fdp_view *view,
                    bool writes) {
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  int64_t strides_bytes[FDP_MAX_DIMS];
  for (int32_t d = 0; d < view->ndim; ++d) strides_bytes[d] = view->strides[d] * item_bytes;
  sim_touch_strided(operation, stream, view->data, view->ndim, view->shape, strides_bytes,
                    item_bytes, writes);
}
