/* A transport moves data between devices: a table of functions and one struct behind it. Verbs
 * plan, transports carry; a verb never looks at which one it was given. In order of preference
 * (context.c): `local`, one memory; `peer`, GPUs that map each other's; `nccl`, GPUs that NCCL
 * connects; `host`, anything, staged through pinned host memory.
 *
 * Every operation enqueues and returns. Its contract about streams is the same for all: it reads
 * what lies on an endpoint on that endpoint's stream, after all that is enqueued there, and writes
 * on the target's; when it returns, each source's stream waits for the reads, and the targets'
 * streams have the writes enqueued. When it fails, work may have been enqueued in part; sources'
 * streams then may not wait for it, but home's waits for all that reads the sources of a sum on
 * other streams than theirs.
 * Endpoints may repeat devices and streams. Argument arrays are read before the call returns. Any
 * thread; a transport guards what it keeps.
 *
 * Memory of the host on the stream NULL is different, as nothing can wait there but the caller.
 * What goes to it has arrived when the call returns. What is read from it may still be read
 * afterwards: whoever called keeps it, unchanged, until the targets' streams have passed. */
#ifndef FDP_TRANSPORT_H
#define FDP_TRANSPORT_H

#include "order.h"
#include "pool.h"

typedef struct fdp_transport fdp_transport;

/* A stream, with what belongs to its device. All borrowed from the context. */
typedef struct fdp_endpoint {
  fdp_device *device;
  fdp_stream *stream;
  fdp_pool *pool;   /* scratch on the device */
  fdp_pool *pinned; /* scratch in host memory that the device reaches */
  fdp_order *order; /* makes streams wait for a stream of the device */
} fdp_endpoint;

/* Copies from memory of `source` to memory of `target`. */
typedef struct fdp_transfer {
  fdp_endpoint source;
  fdp_endpoint target;
  const fdp_strided_copy *copies;
  int32_t copy_count;
} fdp_transfer;

typedef struct fdp_transport_ops {
  const char *name; /* as in FASTDP_TRANSPORT */
  void (*close)(fdp_transport *transport);
  /* FDP_OK if it can carry between `home` and each of `others`, whose streams are not looked at;
   * FDP_UNSUPPORTED, with what is missing for a message, if not. Asked for each call of a verb:
   * what takes time to find out is kept. */
  fdp_status (*joins)(const fdp_transport *transport, const fdp_endpoint *home,
                      const fdp_endpoint *others, int32_t other_count);

  /* The targets of all transfers are disjoint from each other and from all sources. */
  fdp_status (*copy)(const fdp_transport *transport, const fdp_transfer *transfers,
                     int32_t transfer_count);
  /* Packs tensors of `home` into the flat buffer of each target. No segment's tensor is NULL, and
   * their offsets ascend. Bytes between segments may be written too. */
  fdp_status (*pack)(const fdp_transport *transport, const fdp_endpoint *home,
                     const fdp_segment *segments, int32_t segment_count,
                     const fdp_endpoint *targets, void *const *flats, int32_t target_count);
  /* sums[k].sources[r] lies on ranks[r] (or is NULL), sums[k].target on home; source_count is
   * rank_count in each. All targets lie in [span, span + span_bytes), at ascending addresses, and
   * each at a multiple of its element's size from its start, which may be any address that suits
   * the element. A target may be one of its own sources. Bytes between targets may be written
   * too. */
  fdp_status (*sum)(const fdp_transport *transport, const fdp_endpoint *home,
                    const fdp_endpoint *ranks, int32_t rank_count, const fdp_sum *sums,
                    int32_t sum_count, void *span, int64_t span_bytes);
} fdp_transport_ops;

/* Every transport's struct begins with this. */
struct fdp_transport {
  const fdp_transport_ops *ops;
};

/* `then` runs after all that was enqueued on `first` so far. */
static inline fdp_status fdp_endpoint_after(const fdp_endpoint *first, const fdp_endpoint *then) {
  return fdp_order_after(first->order, first->stream,
                         (fdp_stream_ref){then->device, then->stream});
}

/* After a failure with `status`, which it returns: the same, as far as it goes. The thread's
 * message stays. */
fdp_status fdp_endpoint_settle(const fdp_endpoint *first, const fdp_endpoint *then,
                               fdp_status status);

static inline fdp_stream_ref fdp_endpoint_ref(const fdp_endpoint *endpoint) {
  return (fdp_stream_ref){endpoint->device, endpoint->stream};
}

/* Enqueues copies on the endpoint: plain ones (ndim 0) one by one, so that a copy engine can take
 * them, all others by one launch. */
fdp_status fdp_endpoint_copy(const fdp_endpoint *endpoint, const fdp_strided_copy *copies,
                             int32_t copy_count);

static inline bool fdp_endpoint_equal(const fdp_endpoint *a, const fdp_endpoint *b) {
  return a->device == b->device && a->stream == b->stream;
}

#endif
