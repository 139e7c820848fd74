#include "transport_host.h"

#include <stdlib.h>

#include "relay.h"
#include "span.h"

static bool is_host(const fdp_endpoint *endpoint) {
  return endpoint->device->id.kind == FDP_DEVICE_HOST;
}

static void host_close(fdp_transport *transport) { free(transport); }

static fdp_status host_joins(const fdp_transport *transport, const fdp_endpoint *home,
                             const fdp_endpoint *others, int32_t other_count) {
  (void)transport;
  (void)home;
  (void)others;
  (void)other_count;
  return FDP_OK;
}

/* --- pinned memory between two endpoints, one of them a GPU --- */

typedef struct host_lease {
  fdp_pool *pool;
  fdp_buffer *buffer;
} host_lease;

/* Pinned memory that `source` may write from now on, on its stream. */
static fdp_status lease_open(host_lease *lease, const fdp_endpoint *source,
                             const fdp_endpoint *target, int64_t size_bytes) {
  if (is_host(source)) { /* written by the host at once */
    lease->pool = target->pinned;
    return fdp_pool_take_passed(lease->pool, size_bytes, &lease->buffer);
  }
  lease->pool = source->pinned;
  return fdp_pool_take_deep(lease->pool, size_bytes, fdp_endpoint_ref(source), &lease->buffer);
}

/* The host's streams have no events that a GPU could wait for: the host waits here. After that it
 * uses the memory no more. */
static fdp_status drain(const fdp_endpoint *endpoint) {
  return fdp_order_after(endpoint->order, endpoint->stream,
                         (fdp_stream_ref){endpoint->device, NULL});
}

/* `targets` have read. After a failure the source may still be writing. */
static fdp_status lease_close(host_lease *lease, const fdp_endpoint *source,
                              const fdp_endpoint *targets, int32_t target_count,
                              fdp_status status) {
  fdp_stream_ref users[FDP_POOL_MAX_USERS];
  fdp_message why; /* of the failure that came first */
  int32_t count = 0;
  bool is_in_use = false; /* by the host, for all that is known */
  if (!lease->buffer) return status;
  fdp_message_keep(&why);
  for (int32_t i = -1; i < target_count; ++i) {
    const fdp_endpoint *user = i < 0 ? source : &targets[i];
    if (i < 0 && status == FDP_OK) continue;
    if (!is_host(user)) {
      users[count++] = fdp_endpoint_ref(user);
    } else if (user->stream) {
      fdp_status drained = drain(user);
      if (drained == FDP_OK) continue;
      is_in_use = true;
      if (status != FDP_OK) continue;
      status = drained;
      fdp_message_keep(&why);
    }
  }
  fdp_buffer *buffer = lease->buffer;
  lease->buffer = NULL;
  if (is_in_use) fdp_pool_lose(lease->pool, buffer);
  fdp_message_restore(&why);
  if (is_in_use) return status;
  return fdp_pool_give_many(lease->pool, buffer, users, count, status);
}

/* One piece of memory, through `pinned` in chunks: while one arrives the next is sent. */
static fdp_status stream_through(const fdp_endpoint *source, const void *from, void *pinned,
                                 const fdp_endpoint *target, void *to, int64_t size_bytes) {
  fdp_status status = FDP_OK;
  for (int64_t at = 0; at < size_bytes; at += FDP_RELAY_CHUNK_BYTES) {
    int64_t left_bytes = size_bytes - at;
    int64_t chunk_bytes = left_bytes < FDP_RELAY_CHUNK_BYTES ? left_bytes : FDP_RELAY_CHUNK_BYTES;
    FDP_TRY(source->device->ops->copy(source->device, source->stream, (char *)pinned + at,
                                      (const char *)from + at, chunk_bytes));
    FDP_TRY(fdp_endpoint_after(source, target));
    FDP_TRY(target->device->ops->copy(target->device, target->stream, (char *)to + at,
                                      (char *)pinned + at, chunk_bytes));
  }
done:
  return status;
}

/* --- copy --- */

/* A transfer between different memories. */
typedef struct host_relay {
  const fdp_transfer *transfer;
  host_lease lease;
  fdp_strided_copy *halves; /* room for each copy twice: gather, spread */
  bool is_delivered;
} host_relay;

static bool is_direct(const fdp_transfer *transfer) {
  if (transfer->source.device == transfer->target.device) return true;
  return is_host(&transfer->source) &&
         (is_host(&transfer->target) ||
          fdp_relay_is_plain(transfer->copies, transfer->copy_count));
}

/* Halves that are plain on both sides go in chunks, for GPUs; anything else as a whole. */
static fdp_status send(host_relay *relay) {
  const fdp_transfer *transfer = relay->transfer;
  const fdp_endpoint *source = &transfer->source, *target = &transfer->target;
  int32_t count = transfer->copy_count;
  int64_t size_bytes = fdp_relay_size_bytes(transfer->copies, count);
  fdp_strided_copy *gather = relay->halves, *spread = relay->halves + count;
  fdp_status status;
  FDP_TRY(lease_open(&relay->lease, source, target, size_bytes));
  void *pinned = relay->lease.buffer->data;
  fdp_relay_plan(transfer->copies, count, FDP_RELAY_GATHER, pinned, gather);
  fdp_relay_plan(transfer->copies, count, FDP_RELAY_SPREAD, pinned, spread);
  bool is_plain = fdp_relay_is_plain(gather, count) && fdp_relay_is_plain(spread, count);
  if (is_plain && !is_host(source) && !is_host(target)) {
    for (int32_t i = 0; i < count; ++i) {
      FDP_TRY(stream_through(source, gather[i].source, gather[i].target, target, spread[i].target,
                             spread[i].item_bytes));
    }
    relay->is_delivered = true;
    goto done;
  }
  FDP_TRY(fdp_endpoint_copy(source, gather, count));
done:
  return status;
}

static fdp_status deliver(host_relay *relay) {
  const fdp_transfer *transfer = relay->transfer;
  fdp_status status = FDP_OK;
  if (relay->is_delivered) return FDP_OK;
  FDP_TRY(fdp_endpoint_after(&transfer->source, &transfer->target));
  FDP_TRY(fdp_endpoint_copy(&transfer->target, relay->halves + transfer->copy_count,
                            transfer->copy_count));
done:
  return status;
}

/* First all is sent, then all is delivered: what goes to the host is waited for there. */
static fdp_status copy_relayed(const fdp_transfer *transfers, int32_t transfer_count) {
  host_relay relays[FDP_MAX_REPLICAS];
  fdp_strided_copy *halves = NULL;
  int32_t relay_count = 0;
  size_t copy_count = 0;
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < transfer_count; ++i) {
    if (is_direct(&transfers[i]) || transfers[i].copy_count == 0) continue;
    relays[relay_count++] = (host_relay){.transfer = &transfers[i]};
    copy_count += (size_t)transfers[i].copy_count;
  }
  if (relay_count == 0) return FDP_OK;
  halves = malloc(2 * copy_count * sizeof *halves);
  if (!halves) {
    return fdp_fail(FDP_OUT_OF_MEMORY, "host: no host memory for %zu copies", 2 * copy_count);
  }
  fdp_strided_copy *next = halves;
  for (int32_t i = 0; i < relay_count; ++i) {
    relays[i].halves = next;
    next += 2 * relays[i].transfer->copy_count;
    FDP_TRY(send(&relays[i]));
  }
  for (int32_t i = 0; i < relay_count; ++i) FDP_TRY(deliver(&relays[i]));
done:
  for (int32_t i = 0; i < relay_count; ++i) {
    const fdp_transfer *transfer = relays[i].transfer;
    status = lease_close(&relays[i].lease, &transfer->source, &transfer->target, 1, status);
  }
  free(halves);
  return status;
}

/* What was read in place has to be waited for, but on the host's NULL stream nothing can be:
 * transport.h. */
static bool must_wait(const fdp_transfer *transfer) {
  return transfer->source.stream || !is_host(&transfer->source);
}

static fdp_status host_copy(const fdp_transport *transport, const fdp_transfer *transfers,
                            int32_t transfer_count) {
  (void)transport;
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < transfer_count; ++i) {
    if (!is_direct(&transfers[i])) continue;
    FDP_TRY(fdp_endpoint_after(&transfers[i].source, &transfers[i].target));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    if (!is_direct(&transfers[i])) continue;
    FDP_TRY(fdp_endpoint_copy(&transfers[i].target, transfers[i].copies,
                              transfers[i].copy_count));
  }
  FDP_TRY(copy_relayed(transfers, transfer_count));
  for (int32_t i = 0; i < transfer_count; ++i) {
    if (!is_direct(&transfers[i]) || !must_wait(&transfers[i])) continue;
    FDP_TRY(fdp_endpoint_after(&transfers[i].target, &transfers[i].source));
  }
done:
  return status;
}

/* --- pack --- */

/* Packs the segments, gaps filled, into scratch of their own device. */
static fdp_status pack_scratch(const fdp_endpoint *endpoint, const fdp_segment *segments,
                               int32_t segment_count, int64_t size_bytes, fdp_buffer **scratch) {
  fdp_status status;
  fdp_segment *filled = malloc((2 * (size_t)segment_count + 1) * sizeof *filled);
  if (!filled) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no host memory for the segments");
  int32_t count = fdp_span_fill(segments, segment_count, size_bytes, filled);
  FDP_TRY(fdp_pool_take(endpoint->pool, size_bytes, endpoint->stream, scratch));
  FDP_TRY(endpoint->device->ops->pack(endpoint->device, endpoint->stream, (*scratch)->data, filled,
                                      count));
done:
  free(filled);
  return status;
}

static fdp_status give_scratch(const fdp_endpoint *owner, fdp_buffer *scratch, fdp_status status) {
  fdp_stream_ref user = fdp_endpoint_ref(owner);
  return fdp_pool_give_many(owner->pool, scratch, &user, 1, status);
}

/* Home's bucket goes once to pinned memory, in chunks, and from there to every target. */
static fdp_status pack_relayed(const fdp_endpoint *home, const fdp_segment *segments,
                               int32_t segment_count, const fdp_endpoint *targets,
                               void *const *flats, int32_t target_count) {
  int64_t size_bytes = fdp_span_size_bytes(segments, segment_count);
  host_lease lease = {0};
  fdp_buffer *scratch = NULL;
  fdp_status status;
  FDP_TRY(pack_scratch(home, segments, segment_count, size_bytes, &scratch));
  FDP_TRY(lease_open(&lease, home, &targets[0], size_bytes));
  char *pinned = lease.buffer->data;
  for (int64_t at = 0; at < size_bytes; at += FDP_RELAY_CHUNK_BYTES) {
    int64_t left_bytes = size_bytes - at;
    int64_t chunk_bytes = left_bytes < FDP_RELAY_CHUNK_BYTES ? left_bytes : FDP_RELAY_CHUNK_BYTES;
    FDP_TRY(home->device->ops->copy(home->device, home->stream, pinned + at,
                                    (char *)scratch->data + at, chunk_bytes));
    for (int32_t i = 0; i < target_count; ++i) {
      fdp_device *device = targets[i].device;
      FDP_TRY(fdp_endpoint_after(home, &targets[i]));
      FDP_TRY(device->ops->copy(device, targets[i].stream, (char *)flats[i] + at, pinned + at,
                                chunk_bytes));
    }
  }
done:
  status = lease_close(&lease, home, targets, target_count, status);
  return give_scratch(home, scratch, status);
}

static fdp_status host_pack(const fdp_transport *transport, const fdp_endpoint *home,
                            const fdp_segment *segments, int32_t segment_count,
                            const fdp_endpoint *targets, void *const *flats,
                            int32_t target_count) {
  fdp_endpoint near[FDP_MAX_REPLICAS], far[FDP_MAX_REPLICAS];
  void *near_flats[FDP_MAX_REPLICAS], *far_flats[FDP_MAX_REPLICAS];
  int32_t near_count = 0, far_count = 0;
  fdp_status status = FDP_OK;
  (void)transport;
  if (segment_count == 0) return FDP_OK;
  for (int32_t i = 0; i < target_count; ++i) {
    if (targets[i].device == home->device) {
      near[near_count] = targets[i];
      near_flats[near_count++] = flats[i];
    } else {
      far[far_count] = targets[i];
      far_flats[far_count++] = flats[i];
    }
  }
  for (int32_t i = 0; i < near_count; ++i) FDP_TRY(fdp_endpoint_after(home, &near[i]));
  if (far_count > 0) {
    FDP_TRY(pack_relayed(home, segments, segment_count, far, far_flats, far_count));
  }
  for (int32_t i = 0; i < near_count; ++i) {
    FDP_TRY(home->device->ops->pack(home->device, near[i].stream, near_flats[i], segments,
                                    segment_count));
  }
  for (int32_t i = 0; i < near_count; ++i) FDP_TRY(fdp_endpoint_after(&near[i], home));
done:
  return status;
}

/* --- sum --- */

/* Brings what the rank contributes into scratch on home, where home's stream has it enqueued. */
static fdp_status bring_rank(fdp_span_sums *sums, int32_t r, const fdp_endpoint *rank,
                             const fdp_endpoint *home, int64_t span_bytes, fdp_segment *segments,
                             fdp_buffer **arrived) {
  host_lease lease = {0};
  fdp_buffer *scratch = NULL;
  fdp_status status = FDP_OK;
  int32_t count = fdp_span_segments(sums, r, segments);
  if (count == 0) return FDP_OK;
  FDP_TRY(fdp_pool_take(home->pool, span_bytes, home->stream, arrived));
  FDP_TRY(pack_scratch(rank, segments, count, span_bytes, &scratch));
  FDP_TRY(lease_open(&lease, rank, home, span_bytes));
  FDP_TRY(stream_through(rank, scratch->data, lease.buffer->data, home, (*arrived)->data,
                         span_bytes));
  fdp_span_move(sums, r, (*arrived)->data);
done:
  status = lease_close(&lease, rank, home, 1, status);
  return give_scratch(rank, scratch, status);
}

static fdp_status host_sum(const fdp_transport *transport, const fdp_endpoint *home,
                           const fdp_endpoint *ranks, int32_t rank_count, const fdp_sum *sums,
                           int32_t sum_count, void *span, int64_t span_bytes) {
  fdp_buffer *arrived[FDP_MAX_REPLICAS] = {NULL};
  fdp_span_sums moved = {0};
  fdp_segment *segments = NULL;
  fdp_status status;
  (void)transport;
  if (sum_count == 0) return FDP_OK;
  FDP_TRY(fdp_span_sums_open(&moved, sums, sum_count, rank_count, span));
  segments = malloc((size_t)sum_count * sizeof *segments);
  if (!segments) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "host: no host memory for %d segments", sum_count);
    goto done;
  }
  for (int32_t r = 0; r < rank_count; ++r) {
    if (ranks[r].device == home->device) {
      FDP_TRY(fdp_endpoint_after(&ranks[r], home));
    } else {
      FDP_TRY(bring_rank(&moved, r, &ranks[r], home, span_bytes, segments, &arrived[r]));
    }
  }
  FDP_TRY(home->device->ops->sum(home->device, home->stream, moved.sums, moved.count));
  for (int32_t r = 0; r < rank_count; ++r) {
    if (ranks[r].device == home->device) FDP_TRY(fdp_endpoint_after(home, &ranks[r]));
  }
done:
  for (int32_t r = 0; r < rank_count; ++r) status = give_scratch(home, arrived[r], status);
  free(segments);
  fdp_span_sums_close(&moved);
  return status;
}

static const fdp_transport_ops host_ops = {
    .name = "host",
    .close = host_close,
    .joins = host_joins,
    .copy = host_copy,
    .pack = host_pack,
    .sum = host_sum,
};

fdp_status fdp_transport_host_open(fdp_transport **transport) {
  fdp_transport *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "host: no host memory for the transport");
  opened->ops = &host_ops;
  *transport = opened;
  return FDP_OK;
}
