/* Scratch buffers of one device. A buffer is owned by the pool and lent to whoever takes it. It
 * comes back with an event recorded on the stream that used it last, and the stream of the next
 * taker waits for that event; so neither side ever waits on the host. After warm-up nothing is
 * taken from the device. Any thread; one mutex. The device is borrowed and must outlive the
 * pool. */
#ifndef FDP_POOL_H
#define FDP_POOL_H

#include "device.h"

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

/* Keeps at most `idle_limit_bytes` unused before it gives the oldest buffers back to the device. */
fdp_status fdp_pool_open(fdp_device *device, int64_t idle_limit_bytes, fdp_pool **pool);
/* All buffers must be back and all work on them done. */
void fdp_pool_close(fdp_pool *pool);

/* `stream` waits for the buffer's last use. */
fdp_status fdp_pool_take(fdp_pool *pool, int64_t size_bytes, fdp_stream *stream,
                         fdp_buffer **buffer);
/* Records on `stream`, on which the buffer's last use was enqueued. The buffer is back even when
 * this fails, but is not lent again. NULL buffers are fine. */
fdp_status fdp_pool_give(fdp_pool *pool, fdp_buffer *buffer, fdp_stream *stream);

/* Gives every unused buffer whose last use is over back to the device. */
void fdp_pool_trim(fdp_pool *pool);
/* From now on a buffer that comes back is filled with bytes 0xFF (NaN in every float type). */
fdp_status fdp_pool_debug_fill(fdp_pool *pool);
fdp_pool_stats fdp_pool_read_stats(fdp_pool *pool);

#endif
