#include "pool.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

/* Sizes are rounded up to classes: four to each doubling, so at most a quarter is wasted. */
#define FIRST_CLASS_BYTES 512
#define CLASS_COUNT (4 * 48)

typedef struct pool_buffer {
  fdp_buffer lent; /* first: what the taker sees */
  int32_t class_index;
  fdp_event *event; /* its last use */
  fdp_stream *last_stream;
  uint64_t given_at; /* the pool's clock when it came back */
  struct pool_buffer *next;
} pool_buffer;

struct fdp_pool {
  fdp_device *device;
  int64_t idle_limit_bytes;
  pthread_mutex_t mutex; /* guards all below */
  uint64_t clock;
  void *fill_source; /* FDP_ALIGNMENT_BYTES bytes 0xFF on the device, or NULL */
  fdp_pool_stats stats;
  pool_buffer *idle[CLASS_COUNT]; /* the last given first */
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

fdp_status fdp_pool_open(fdp_device *device, int64_t idle_limit_bytes, fdp_pool **pool) {
  fdp_pool *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "pool: no host memory");
  opened->device = device;
  opened->idle_limit_bytes = idle_limit_bytes;
  pthread_mutex_init(&opened->mutex, NULL);
  *pool = opened;
  return FDP_OK;
}

/* The buffer is in no list. */
static void buffer_close_locked(fdp_pool *pool, pool_buffer *buffer) {
  const fdp_device_ops *ops = pool->device->ops;
  if (buffer->event) ops->event_close(pool->device, buffer->event);
  ops->memory_drop(pool->device, buffer->lent.data);
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
  if (pool->fill_source) pool->device->ops->memory_drop(pool->device, pool->fill_source);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

static void lose_locked(fdp_pool *pool, pool_buffer *buffer) {
  buffer->next = pool->lost;
  pool->lost = buffer;
}

/* The event of a failed stream passes too: nothing more will run on it. */
static bool has_passed(fdp_pool *pool, pool_buffer *buffer) {
  bool passed = false;
  pool->device->ops->event_query(pool->device, buffer->event, &passed);
  return passed;
}

/* Drops passed buffers, the oldest first, until at most `keep_bytes` are idle. */
static void trim_locked(fdp_pool *pool, int64_t keep_bytes) {
  while (pool->stats.idle_bytes > keep_bytes) {
    pool_buffer **oldest = NULL;
    for (int32_t i = 0; i < CLASS_COUNT; ++i) {
      for (pool_buffer **link = &pool->idle[i]; *link; link = &(*link)->next) {
        bool is_older = !oldest || (*link)->given_at < (*oldest)->given_at;
        if (is_older && has_passed(pool, *link)) oldest = link;
      }
    }
    if (!oldest) return;
    pool_buffer *buffer = *oldest;
    unlink_idle_locked(pool, oldest);
    buffer_close_locked(pool, buffer);
  }
}

void fdp_pool_trim(fdp_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  trim_locked(pool, 0);
  pthread_mutex_unlock(&pool->mutex);
}

static fdp_status open_buffer_locked(fdp_pool *pool, int32_t class_index, pool_buffer **buffer) {
  const fdp_device_ops *ops = pool->device->ops;
  size_t size_bytes = (size_t)class_bytes(class_index);
  fdp_status status;
  pool_buffer *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "pool: no host memory");
  opened->class_index = class_index;
  opened->lent.size_bytes = (int64_t)size_bytes;
  FDP_TRY(ops->event_open(pool->device, &opened->event));
  pool->stats.device_takes += 1;
  status = fdp_device_memory_take(pool->device, size_bytes, &opened->lent.data);
  if (status == FDP_OUT_OF_MEMORY && pool->stats.idle_count > 0) {
    trim_locked(pool, 0);
    pool->stats.device_takes += 1;
    status = fdp_device_memory_take(pool->device, size_bytes, &opened->lent.data);
  }
done:
  if (status != FDP_OK) {
    if (opened->event) ops->event_close(pool->device, opened->event);
    free(opened);
    return status;
  }
  *buffer = opened;
  return FDP_OK;
}

/* A buffer last used on the same stream costs no waiting; of the others the oldest has most likely
 * passed. */
static pool_buffer *find_idle_locked(fdp_pool *pool, int32_t class_index, fdp_stream *stream) {
  pool_buffer **best = NULL;
  for (pool_buffer **link = &pool->idle[class_index]; *link; link = &(*link)->next) {
    best = link;
    if ((*link)->last_stream == stream) break;
  }
  if (!best) return NULL;
  pool_buffer *found = *best;
  unlink_idle_locked(pool, best);
  return found;
}

fdp_status fdp_pool_take(fdp_pool *pool, int64_t size_bytes, fdp_stream *stream,
                         fdp_buffer **buffer) {
  assert(size_bytes >= 0);
  int32_t class_index = class_of(size_bytes);
  if (class_index < 0) {
    return fdp_fail(FDP_OUT_OF_MEMORY, "pool: %" PRId64 " bytes asked for, at most %" PRId64
                    " can be", size_bytes, class_bytes(CLASS_COUNT - 1));
  }
  const fdp_device_ops *ops = pool->device->ops;
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&pool->mutex);
  pool_buffer *taken = find_idle_locked(pool, class_index, stream);
  if (!taken) FDP_TRY(open_buffer_locked(pool, class_index, &taken));
  status = ops->stream_wait(pool->device, stream, taken->event);
  if (status != FDP_OK) {
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

static fdp_status fill(fdp_pool *pool, pool_buffer *buffer, fdp_stream *stream) {
  fdp_strided_copy copy = {
      .target = buffer->lent.data,
      .source = pool->fill_source,
      .item_bytes = FDP_ALIGNMENT_BYTES,
      .ndim = 1,
      .shape = {buffer->lent.size_bytes / FDP_ALIGNMENT_BYTES},
      .target_strides_bytes = {FDP_ALIGNMENT_BYTES},
      .source_strides_bytes = {0},
  };
  return pool->device->ops->copy_strided(pool->device, stream, &copy, 1);
}

fdp_status fdp_pool_give(fdp_pool *pool, fdp_buffer *buffer, fdp_stream *stream) {
  if (!buffer) return FDP_OK;
  pool_buffer *given = (pool_buffer *)buffer;
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&pool->mutex);
  pool->stats.lent_count -= 1;
  pool->stats.lent_bytes -= given->lent.size_bytes;
  if (pool->fill_source) FDP_TRY(fill(pool, given, stream));
  FDP_TRY(pool->device->ops->event_record(pool->device, given->event, stream));
  given->last_stream = stream;
  given->given_at = ++pool->clock;
  given->next = pool->idle[given->class_index];
  pool->idle[given->class_index] = given;
  pool->stats.idle_count += 1;
  pool->stats.idle_bytes += given->lent.size_bytes;
  trim_locked(pool, pool->idle_limit_bytes);
done:
  if (status != FDP_OK) lose_locked(pool, given);
  pthread_mutex_unlock(&pool->mutex);
  return status;
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
  FDP_TRY(fdp_device_memory_take(pool->device, sizeof ones, &source));
  FDP_TRY(ops->copy(pool->device, NULL, source, ones, sizeof ones));
  FDP_TRY(ops->event_open(pool->device, &event));
  FDP_TRY(ops->event_record(pool->device, event, NULL));
  FDP_TRY(ops->event_synchronize(pool->device, event, FDP_DEFAULT_TIMEOUT_MS, NULL));
  pool->fill_source = source;
  source = NULL;
done:
  if (event) ops->event_close(pool->device, event);
  if (source) ops->memory_drop(pool->device, source);
  pthread_mutex_unlock(&pool->mutex);
  return status;
}

fdp_pool_stats fdp_pool_read_stats(fdp_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  fdp_pool_stats stats = pool->stats;
  pthread_mutex_unlock(&pool->mutex);
  return stats;
}
