#include "pool.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Sizes are rounded up to classes: four to each doubling, so at most a quarter is wasted. */
#define FIRST_CLASS_BYTES 512
#define CLASS_COUNT (4 * 48)

/* One of a buffer's last users. The event belongs to the device of the stream that it was recorded
 * on, which is not always the pool's. */
typedef struct pool_use {
  fdp_device *device;
  fdp_event *event;
} pool_use;

typedef struct pool_buffer {
  fdp_buffer lent; /* first: what the taker sees */
  int32_t class_index;
  pool_use uses[FDP_POOL_MAX_USERS]; /* the first use_count have to pass */
  int32_t use_count;
  fdp_stream_ref last; /* the first of the last users */
  uint64_t given_at; /* the pool's clock when it came back */
  struct pool_buffer *next;
} pool_buffer;

struct fdp_pool {
  fdp_device *device;
  bool is_pinned; /* host memory that the device can reach */
  int64_t idle_limit_bytes;
  pthread_mutex_t mutex; /* guards all below */
  uint64_t clock;
  void *fill_source; /* FDP_ALIGNMENT_BYTES bytes 0xFF on the device, or NULL */
  fdp_pool_stats stats;
  pool_buffer *idle[CLASS_COUNT]; /* the last given first */
  int32_t buffer_counts[CLASS_COUNT]; /* idle or lent */
  pool_buffer *lost; /* last use cannot be waited for: not lent, nor dropped before close */
};

static int64_t class_bytes(int32_t index) {
  return (int64_t)(4 + index % 4) * (FIRST_CLASS_BYTES / 4) << (index / 4);
}

/* The smallest class that fits, or -1. */
static int32_t class_of(int64_t size_bytes) {
  int32_t index = 0;
  while (index < CLASS_COUNT && class_bytes(index) < size_bytes) ++index;
  return index < CLASS_COUNT ? index : -1;
}

static fdp_status pool_open(fdp_device *device, bool is_pinned, int64_t idle_limit_bytes,
                            fdp_pool **pool) {
  fdp_pool *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "pool: no host memory");
  opened->device = device;
  opened->is_pinned = is_pinned;
  opened->idle_limit_bytes = idle_limit_bytes;
  pthread_mutex_init(&opened->mutex, NULL);
  *pool = opened;
  return FDP_OK;
}

fdp_status fdp_pool_open(fdp_device *device, int64_t idle_limit_bytes, fdp_pool **pool) {
  return pool_open(device, false, idle_limit_bytes, pool);
}

fdp_status fdp_pool_open_pinned(fdp_device *device, int64_t idle_limit_bytes, fdp_pool **pool) {
  return pool_open(device, true, idle_limit_bytes, pool);
}

static fdp_status memory_take(fdp_pool *pool, size_t size_bytes, void **address) {
  if (pool->is_pinned) return fdp_device_pinned_take(pool->device, size_bytes, address);
  return fdp_device_memory_take(pool->device, size_bytes, address);
}

static void memory_drop(fdp_pool *pool, void *address) {
  if (pool->is_pinned) {
    pool->device->ops->pinned_drop(pool->device, address);
  } else {
    pool->device->ops->memory_drop(pool->device, address);
  }
}

static void use_close(pool_use *use) {
  if (use->event) use->device->ops->event_close(use->device, use->event);
  *use = (pool_use){0};
}

static fdp_status use_open(pool_use *use, fdp_device *device) {
  if (use->device == device) return FDP_OK;
  use_close(use);
  fdp_status status = device->ops->event_open(device, &use->event);
  if (status == FDP_OK) use->device = device;
  return status;
}

/* The buffer is in no list. */
static void buffer_close_locked(fdp_pool *pool, pool_buffer *buffer) {
  for (int32_t i = 0; i < FDP_POOL_MAX_USERS; ++i) use_close(&buffer->uses[i]);
  memory_drop(pool, buffer->lent.data);
  free(buffer);
}

static void unlink_idle_locked(fdp_pool *pool, pool_buffer **link) {
  pool_buffer *buffer = *link;
  *link = buffer->next;
  buffer->next = NULL;
  pool->stats.idle_count -= 1;
  pool->stats.idle_bytes -= buffer->lent.size_bytes;
}

void fdp_pool_close(fdp_pool *pool) {
  if (!pool) return;
  assert(pool->stats.lent_count == 0);
  for (int32_t i = 0; i < CLASS_COUNT; ++i) {
    while (pool->idle[i]) {
      pool_buffer *buffer = pool->idle[i];
      unlink_idle_locked(pool, &pool->idle[i]);
      buffer_close_locked(pool, buffer);
    }
  }
  while (pool->lost) {
    pool_buffer *buffer = pool->lost;
    pool->lost = buffer->next;
    buffer_close_locked(pool, buffer);
  }
  if (pool->fill_source) memory_drop(pool, pool->fill_source);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

static void lose_locked(fdp_pool *pool, pool_buffer *buffer) {
  pool->buffer_counts[buffer->class_index] -= 1;
  buffer->next = pool->lost;
  pool->lost = buffer;
}

/* The event of a failed stream passes too: nothing more will run on it. */
static bool has_passed(const pool_buffer *buffer) {
  for (int32_t i = 0; i < buffer->use_count; ++i) {
    const pool_use *use = &buffer->uses[i];
    bool passed = false;
    use->device->ops->event_query(use->device, use->event, &passed);
    if (!passed) return false;
  }
  return true;
}

/* Drops passed buffers that lie idle since `stale_gives` others came back, the oldest first, until
 * at most `keep_bytes` are idle. */
static void trim_locked(fdp_pool *pool, int64_t keep_bytes, uint64_t stale_gives) {
  while (pool->stats.idle_bytes > keep_bytes) {
    pool_buffer **oldest = NULL;
    for (int32_t i = 0; i < CLASS_COUNT; ++i) {
      for (pool_buffer **link = &pool->idle[i]; *link; link = &(*link)->next) {
        bool is_older = !oldest || (*link)->given_at < (*oldest)->given_at;
        bool is_stale = pool->clock - (*link)->given_at >= stale_gives;
        if (is_older && is_stale && has_passed(*link)) oldest = link;
      }
    }
    if (!oldest) return;
    pool_buffer *buffer = *oldest;
    unlink_idle_locked(pool, oldest);
    pool->buffer_counts[buffer->class_index] -= 1;
    buffer_close_locked(pool, buffer);
  }
}

void fdp_pool_trim(fdp_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  trim_locked(pool, 0, 0);
  pthread_mutex_unlock(&pool->mutex);
}

static fdp_status open_buffer_locked(fdp_pool *pool, int32_t class_index, pool_buffer **buffer) {
  size_t size_bytes = (size_t)class_bytes(class_index);
  fdp_status status;
  pool_buffer *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "pool: no host memory");
  opened->class_index = class_index;
  opened->lent.size_bytes = (int64_t)size_bytes;
  FDP_TRY(use_open(&opened->uses[0], pool->device));
  pool->stats.device_takes += 1;
  status = memory_take(pool, size_bytes, &opened->lent.data);
  if (status == FDP_OUT_OF_MEMORY && pool->stats.idle_count > 0) {
    trim_locked(pool, 0, 0);
    pool->stats.device_takes += 1;
    status = memory_take(pool, size_bytes, &opened->lent.data);
  }
done:
  if (status != FDP_OK) {
    use_close(&opened->uses[0]);
    free(opened);
    return status;
  }
  pool->buffer_counts[class_index] += 1;
  *buffer = opened;
  return FDP_OK;
}

/* A buffer last used on the same stream costs no waiting; of the others the oldest has most likely
 * passed. With `only_passed` one that would have to be waited for is none. */
static pool_buffer *find_idle_locked(fdp_pool *pool, int32_t class_index, fdp_stream_ref taker,
                                     bool only_passed) {
  pool_buffer **best = NULL;
  for (pool_buffer **link = &pool->idle[class_index]; *link; link = &(*link)->next) {
    fdp_stream_ref last = (*link)->last;
    bool is_own = last.stream == taker.stream && last.device == taker.device &&
                  (*link)->use_count <= 1;
    if (only_passed && !is_own && !has_passed(*link)) continue;
    best = link;
    if (is_own) break;
  }
  if (!best) return NULL;
  pool_buffer *found = *best;
  unlink_idle_locked(pool, best);
  return found;
}

/* `depth`: buffers of the class that are made before one in use is waited for. A taker with no
 * device is the calling thread, which never waits. */
static fdp_status take(fdp_pool *pool, int64_t size_bytes, fdp_stream_ref taker, int32_t depth,
                       fdp_buffer **buffer) {
  assert(size_bytes >= 0);
  int32_t class_index = class_of(size_bytes);
  if (class_index < 0) {
    return fdp_fail(FDP_OUT_OF_MEMORY, "pool: %" PRId64 " bytes asked for, at most %" PRId64
                    " can be", size_bytes, class_bytes(CLASS_COUNT - 1));
  }
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&pool->mutex);
  if (depth > 1 && size_bytes > FDP_POOL_DEEP_BYTES) depth = 1;
  bool may_open = !taker.device || pool->buffer_counts[class_index] < depth;
  pool_buffer *taken = find_idle_locked(pool, class_index, taker, may_open);
  if (!taken) FDP_TRY(open_buffer_locked(pool, class_index, &taken));
  for (int32_t i = 0; i < taken->use_count && taker.device; ++i) {
    status = taker.device->ops->stream_wait(taker.device, taker.stream, taken->uses[i].event);
    if (status == FDP_OK) continue;
    lose_locked(pool, taken);
    goto done;
  }
  pool->stats.lent_count += 1;
  pool->stats.lent_bytes += taken->lent.size_bytes;
  *buffer = &taken->lent;
done:
  pthread_mutex_unlock(&pool->mutex);
  return status;
}

fdp_status fdp_pool_take(fdp_pool *pool, int64_t size_bytes, fdp_stream *stream,
                         fdp_buffer **buffer) {
  return take(pool, size_bytes, (fdp_stream_ref){pool->device, stream}, 0, buffer);
}

fdp_status fdp_pool_take_deep(fdp_pool *pool, int64_t size_bytes, fdp_stream_ref taker,
                              fdp_buffer **buffer) {
  return take(pool, size_bytes, taker, FDP_POOL_DEPTH, buffer);
}

fdp_status fdp_pool_take_passed(fdp_pool *pool, int64_t size_bytes, fdp_buffer **buffer) {
  return take(pool, size_bytes, (fdp_stream_ref){0}, 0, buffer);
}

static fdp_status record_locked(pool_buffer *buffer, int32_t index, fdp_stream_ref user) {
  pool_use *use = &buffer->uses[index];
  fdp_status status = use_open(use, user.device);
  if (status != FDP_OK) return status;
  return user.device->ops->event_record(user.device, use->event, user.stream);
}

/* The first user fills, once the others are through; then it is the last. */
static fdp_status fill_locked(fdp_pool *pool, pool_buffer *buffer, const fdp_stream_ref *users,
                              int32_t user_count) {
  fdp_strided_copy copy = {
      .target = buffer->lent.data,
      .source = pool->fill_source,
      .item_bytes = FDP_ALIGNMENT_BYTES,
      .ndim = 1,
      .shape = {buffer->lent.size_bytes / FDP_ALIGNMENT_BYTES},
      .target_strides_bytes = {FDP_ALIGNMENT_BYTES},
      .source_strides_bytes = {0},
  };
  if (user_count == 0) {
    if (pool->is_pinned) memset(buffer->lent.data, 0xFF, (size_t)buffer->lent.size_bytes);
    return FDP_OK;
  }
  fdp_device *device = users[0].device;
  fdp_status status;
  for (int32_t i = 1; i < user_count; ++i) {
    FDP_TRY(device->ops->stream_wait(device, users[0].stream, buffer->uses[i].event));
  }
  FDP_TRY(device->ops->copy_strided(device, users[0].stream, &copy, 1));
  FDP_TRY(record_locked(buffer, 0, users[0]));
  buffer->use_count = 1;
done:
  return status;
}

static fdp_status give(fdp_pool *pool, fdp_buffer *buffer, const fdp_stream_ref *users,
                       int32_t user_count) {
  if (!buffer) return FDP_OK;
  assert(user_count <= FDP_POOL_MAX_USERS);
  pool_buffer *given = (pool_buffer *)buffer;
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&pool->mutex);
  pool->stats.lent_count -= 1;
  pool->stats.lent_bytes -= given->lent.size_bytes;
  for (int32_t i = 0; i < user_count; ++i) FDP_TRY(record_locked(given, i, users[i]));
  given->use_count = user_count;
  given->last = user_count > 0 ? users[0] : (fdp_stream_ref){0};
  if (pool->fill_source) FDP_TRY(fill_locked(pool, given, users, user_count));
  given->given_at = ++pool->clock;
  given->next = pool->idle[given->class_index];
  pool->idle[given->class_index] = given;
  pool->stats.idle_count += 1;
  pool->stats.idle_bytes += given->lent.size_bytes;
  trim_locked(pool, pool->idle_limit_bytes, FDP_POOL_STALE_GIVES);
done:
  if (status != FDP_OK) lose_locked(pool, given);
  pthread_mutex_unlock(&pool->mutex);
  return status;
}

fdp_status fdp_pool_give(fdp_pool *pool, fdp_buffer *buffer, fdp_stream *stream) {
  return give(pool, buffer, &(fdp_stream_ref){pool->device, stream}, 1);
}

fdp_status fdp_pool_give_many(fdp_pool *pool, fdp_buffer *buffer, const fdp_stream_ref *users,
                              int32_t user_count, fdp_status status) {
  if (status == FDP_OK) return give(pool, buffer, users, user_count);
  fdp_message why;
  fdp_message_keep(&why);
  give(pool, buffer, users, user_count);
  fdp_message_restore(&why);
  return status;
}

void fdp_pool_lose(fdp_pool *pool, fdp_buffer *buffer) {
  pthread_mutex_lock(&pool->mutex);
  pool->stats.lent_count -= 1;
  pool->stats.lent_bytes -= buffer->size_bytes;
  lose_locked(pool, (pool_buffer *)buffer);
  pthread_mutex_unlock(&pool->mutex);
}

fdp_status fdp_pool_debug_fill(fdp_pool *pool) {
  static const unsigned char ones[FDP_ALIGNMENT_BYTES] = {
#define ONES_8 255, 255, 255, 255, 255, 255, 255, 255
      ONES_8, ONES_8, ONES_8, ONES_8, ONES_8, ONES_8, ONES_8, ONES_8};
  static_assert(FDP_ALIGNMENT_BYTES == 64, "the list of ones is 64 bytes long");
  const fdp_device_ops *ops = pool->device->ops;
  fdp_event *event = NULL;
  void *source = NULL;
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&pool->mutex);
  if (pool->fill_source) goto done;
  FDP_TRY(memory_take(pool, sizeof ones, &source));
  FDP_TRY(ops->copy(pool->device, NULL, source, ones, sizeof ones));
  FDP_TRY(ops->event_open(pool->device, &event));
  FDP_TRY(ops->event_record(pool->device, event, NULL));
  FDP_TRY(ops->event_synchronize(pool->device, event, FDP_DEFAULT_TIMEOUT_MS, NULL));
  pool->fill_source = source;
  source = NULL;
done:
  if (event) ops->event_close(pool->device, event);
  if (source) memory_drop(pool, source);
  pthread_mutex_unlock(&pool->mutex);
  return status;
}

fdp_pool_stats fdp_pool_read_stats(fdp_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  fdp_pool_stats stats = pool->stats;
  pthread_mutex_unlock(&pool->mutex);
  return stats;
}
