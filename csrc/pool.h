/* Scratch buffers of one device. A buffer is owned by the pool and lent to whoever takes it. It
 * comes back with an event recorded on each stream that used it last, and the stream of the next
 * taker waits for those events; so neither side ever waits on the host. After warm-up nothing is
 * taken from the device. Streams may be of any device of the pool's backend. Any thread; one mutex.
 * The devices are borrowed and must outlive the pool. */
#ifndef FDP_POOL_H
#define FDP_POOL_H

#include "device.h"

/* Streams that may have used a buffer last: every replica's, and two of a transport's own. */
#define FDP_POOL_MAX_USERS (FDP_MAX_REPLICAS + 2)

typedef struct fdp_pool fdp_pool;

typedef struct fdp_buffer {
  void *data;         /* aligned to FDP_ALIGNMENT_BYTES */
  int64_t size_bytes; /* at least what was asked for */
} fdp_buffer;

typedef struct fdp_pool_stats {
  int64_t lent_bytes;
  int64_t idle_bytes;
  int64_t lent_count;
  int64_t idle_count;
  int64_t device_takes; /* calls of the device's memory_take so far */
} fdp_pool_stats;

/* Above `idle_limit_bytes` unused it gives buffers back to the device that nobody took while
 * FDP_POOL_STALE_GIVES others came back: never what each step takes again. */
fdp_status fdp_pool_open(fdp_device *device, int64_t idle_limit_bytes, fdp_pool **pool);
/* The same over host memory that the device's streams can reach (pinned_take). */
fdp_status fdp_pool_open_pinned(fdp_device *device, int64_t idle_limit_bytes, fdp_pool **pool);
/* All buffers must be back and all work on them done. */
void fdp_pool_close(fdp_pool *pool);

/* `stream` waits for the buffer's last use. */
fdp_status fdp_pool_take(fdp_pool *pool, int64_t size_bytes, fdp_stream *stream,
                         fdp_buffer **buffer);
/* For a taker that should not wait for another's use if that can be helped: up to FDP_POOL_DEPTH
 * buffers of a size (one, if it is large) are made before one in use is taken and waited for. */
fdp_status fdp_pool_take_deep(fdp_pool *pool, int64_t size_bytes, fdp_stream_ref taker,
                              fdp_buffer **buffer);
/* For the calling thread, which waits for nothing: a buffer whose last use is over, or a new
 * one. */
fdp_status fdp_pool_take_passed(fdp_pool *pool, int64_t size_bytes, fdp_buffer **buffer);
/* Records on `stream`, on which the buffer's last use was enqueued. The buffer is back even when
 * this fails, but is not lent again. NULL buffers are fine. */
fdp_status fdp_pool_give(fdp_pool *pool, fdp_buffer *buffer, fdp_stream *stream);
/* Records on each of the streams on which last uses were enqueued; with none, the last use is over.
 * Returns `status`, which the work with the buffer came to, or the failure to give it back. */
fdp_status fdp_pool_give_many(fdp_pool *pool, fdp_buffer *buffer, const fdp_stream_ref *users,
                              int32_t user_count, fdp_status status);

/* For a buffer whose last use cannot be waited for: it is back, but is not lent again. */
void fdp_pool_lose(fdp_pool *pool, fdp_buffer *buffer);

/* Gives every unused buffer whose last use is over back to the device. */
void fdp_pool_trim(fdp_pool *pool);
/* From now on a buffer that comes back is filled with bytes 0xFF (NaN in every float type). */
fdp_status fdp_pool_debug_fill(fdp_pool *pool);
fdp_pool_stats fdp_pool_read_stats(fdp_pool *pool);

#endif
