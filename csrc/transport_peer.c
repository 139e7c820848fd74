#include "transport_peer.h"

#include <stdlib.h>

#include "lane.h"
#include "span.h"

typedef struct peer_transport {
  fdp_transport base;
  fdp_peer_book *book;
  fdp_lanes *lanes;
} peer_transport;

/* The first endpoint of each device but home's. A device may be listed several times. */
typedef struct peer_leads {
  int32_t indices[FDP_MAX_REPLICAS];
  int32_t count;
} peer_leads;

static int32_t lead_of(const fdp_endpoint *endpoints, int32_t index) {
  int32_t lead = 0;
  while (endpoints[lead].device != endpoints[index].device) ++lead;
  return lead;
}

static peer_leads find_leads(const fdp_endpoint *home, const fdp_endpoint *endpoints,
                             int32_t count) {
  peer_leads leads = {.count = 0};
  for (int32_t i = 0; i < count; ++i) {
    bool is_lead = endpoints[i].device != home->device && lead_of(endpoints, i) == i;
    if (is_lead) leads.indices[leads.count++] = i;
  }
  return leads;
}

/* Note "shards". To pull n - 1 whole buckets into home, or out of it, would make home's link the
 * bottleneck. With three or more devices a large bucket is cut into a shard for each device but
 * home, which takes part in all of that shard's traffic: so every link carries the bucket about
 * once each way. */
static bool is_sharded(const peer_leads *leads, int64_t size_bytes) {
  return leads->count > 1 && size_bytes >= FDP_PEER_SHARDED_BYTES;
}

static void peer_close(fdp_transport *transport) {
  peer_transport *opened = (peer_transport *)transport;
  fdp_lanes_close(opened->lanes);
  fdp_peer_book_close(opened->book);
  free(opened);
}

static fdp_status check_gpu(const fdp_endpoint *endpoint) {
  char text[32];
  if (endpoint->device->id.kind == FDP_DEVICE_CUDA) return FDP_OK;
  return fdp_fail(FDP_UNSUPPORTED, "%s is no GPU",
                  fdp_device_text(endpoint->device->id, text, sizeof text));
}

static fdp_status peer_joins(const fdp_transport *transport, const fdp_endpoint *home,
                             const fdp_endpoint *others, int32_t other_count) {
  const peer_transport *opened = (const peer_transport *)transport;
  peer_leads leads = find_leads(home, others, other_count);
  fdp_status status;
  FDP_TRY(check_gpu(home));
  for (int32_t i = 0; i < leads.count; ++i) FDP_TRY(check_gpu(&others[leads.indices[i]]));
  for (int32_t i = -1; i < leads.count; ++i) {
    fdp_device *device = i < 0 ? home->device : others[leads.indices[i]].device;
    for (int32_t k = i + 1; k < leads.count; ++k) {
      FDP_TRY(fdp_peer_book_allows(opened->book, device, others[leads.indices[k]].device));
    }
  }
done:
  return status;
}

/* Three passes, as in transport_local.c: each target's stream reads its source's memory. */
static fdp_status peer_copy(const fdp_transport *transport, const fdp_transfer *transfers,
                            int32_t transfer_count) {
  (void)transport;
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_after(&transfers[i].source, &transfers[i].target));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_copy(&transfers[i].target, transfers[i].copies,
                              transfers[i].copy_count));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_after(&transfers[i].target, &transfers[i].source));
  }
done:
  return status;
}

/* --- pack --- */

typedef struct peer_broadcast {
  const peer_transport *transport;
  const fdp_endpoint *home;
  const fdp_endpoint *targets;
  void *const *flats;
  int32_t target_count;
  peer_leads leads;
  int64_t size_bytes;
  fdp_buffer *scratch; /* the bucket, on home */
} peer_broadcast;

static bool is_at_home(const peer_broadcast *work, int32_t index) {
  return work->targets[index].device == work->home->device;
}

static fdp_status copy_bytes(const fdp_endpoint *endpoint, void *target, const void *source,
                             int64_t size_bytes) {
  if (size_bytes == 0) return FDP_OK;
  return endpoint->device->ops->copy(endpoint->device, endpoint->stream, target, source,
                                     size_bytes);
}

/* Gaps are filled, as the whole is copied from here on. */
static fdp_status pack_scratch(peer_broadcast *work, const fdp_segment *segments,
                               int32_t segment_count) {
  const fdp_endpoint *home = work->home;
  fdp_status status;
  fdp_segment *filled = malloc((2 * (size_t)segment_count + 1) * sizeof *filled);
  if (!filled) return fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory for the segments");
  int32_t count = fdp_span_fill(segments, segment_count, work->size_bytes, filled);
  FDP_TRY(fdp_pool_take_deep(home->pool, work->size_bytes, fdp_endpoint_ref(home),
                             &work->scratch));
  FDP_TRY(home->device->ops->pack(home->device, home->stream, work->scratch->data, filled, count));
done:
  free(filled);
  return status;
}

/* After a failure anybody may still be using the buffer: all streams are its last users. */
static fdp_status give_back(const peer_broadcast *work, const fdp_endpoint *owner,
                            fdp_buffer *buffer, const fdp_endpoint *hub, fdp_status status) {
  fdp_stream_ref users[FDP_POOL_MAX_USERS];
  int32_t count = 0;
  if (hub) users[count++] = fdp_endpoint_ref(hub);
  if (!hub || status != FDP_OK) {
    for (int32_t i = 0; i < work->leads.count; ++i) {
      users[count++] = fdp_endpoint_ref(&work->targets[work->leads.indices[i]]);
    }
  }
  if (status != FDP_OK) users[count++] = fdp_endpoint_ref(work->home);
  return fdp_pool_give_many(owner->pool, buffer, users, count, status);
}

static fdp_status pull_whole(peer_broadcast *work) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < work->leads.count; ++i) {
    int32_t lead = work->leads.indices[i];
    FDP_TRY(copy_bytes(&work->targets[lead], work->flats[lead], work->scratch->data,
                       work->size_bytes));
  }
done:
  return status;
}

/* Every device pulls its shard from home into scratch; when all have theirs, each pulls the others'
 * from there. Events fan in and out through the hub, a lane on home's device: home's own stream
 * would be held up. No stream waits for another's reads of its flat, since nobody reads a flat. */
static fdp_status pull_shards(peer_broadcast *work, const fdp_endpoint *hub) {
  const fdp_endpoint *targets = work->targets;
  const peer_leads *leads = &work->leads;
  fdp_buffer *shards[FDP_MAX_REPLICAS] = {NULL};
  int64_t begins[FDP_MAX_REPLICAS + 1];
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i <= leads->count; ++i) {
    begins[i] = fdp_span_shard_begin(work->size_bytes, leads->count, i);
  }
  for (int32_t i = 0; i < leads->count; ++i) {
    const fdp_endpoint *target = &targets[leads->indices[i]];
    int64_t size_bytes = begins[i + 1] - begins[i];
    FDP_TRY(fdp_pool_take_deep(target->pool, size_bytes, fdp_endpoint_ref(target), &shards[i]));
    FDP_TRY(copy_bytes(target, shards[i]->data, (char *)work->scratch->data + begins[i],
                       size_bytes));
    FDP_TRY(fdp_endpoint_after(target, hub));
  }
  for (int32_t i = 0; i < leads->count; ++i) {
    FDP_TRY(fdp_endpoint_after(hub, &targets[leads->indices[i]]));
  }
  for (int32_t i = 0; i < leads->count; ++i) {
    int32_t index = leads->indices[i];
    for (int32_t step = 0; step < leads->count; ++step) { /* no two start with the same shard */
      int32_t k = (i + step) % leads->count;
      FDP_TRY(copy_bytes(&targets[index], (char *)work->flats[index] + begins[k],
                         shards[k]->data, begins[k + 1] - begins[k]));
    }
  }
  for (int32_t i = 0; i < leads->count; ++i) {
    FDP_TRY(fdp_endpoint_after(&targets[leads->indices[i]], hub));
  }
done:
  for (int32_t i = 0; i < leads->count; ++i) {
    status = give_back(work, &targets[leads->indices[i]], shards[i], hub, status);
  }
  return status;
}

/* A device's other targets copy the flat of its first. */
static fdp_status follow(const peer_broadcast *work) {
  const fdp_endpoint *targets = work->targets;
  fdp_status status = FDP_OK;
  for (int32_t pass = 0; pass < 3; ++pass) {
    for (int32_t i = 0; i < work->target_count; ++i) {
      int32_t lead = lead_of(targets, i);
      if (lead == i || is_at_home(work, i)) continue;
      if (pass == 0) FDP_TRY(fdp_endpoint_after(&targets[lead], &targets[i]));
      if (pass == 1) {
        FDP_TRY(copy_bytes(&targets[i], work->flats[i], work->flats[lead], work->size_bytes));
      }
      if (pass == 2) FDP_TRY(fdp_endpoint_after(&targets[i], &targets[lead]));
    }
  }
done:
  return status;
}

static fdp_status carry(peer_broadcast *work, const fdp_segment *segments, int32_t segment_count) {
  fdp_endpoint lane;
  const fdp_endpoint *hub = NULL;
  fdp_status status;
  if (is_sharded(&work->leads, work->size_bytes)) {
    FDP_TRY(fdp_lane_of(work->transport->lanes, work->home, &lane));
    hub = &lane;
  }
  FDP_TRY(pack_scratch(work, segments, segment_count));
  for (int32_t i = 0; i < work->leads.count; ++i) {
    FDP_TRY(fdp_endpoint_after(work->home, &work->targets[work->leads.indices[i]]));
  }
  FDP_TRY(hub ? pull_shards(work, hub) : pull_whole(work));
done:
  return give_back(work, work->home, work->scratch, hub, status);
}

static fdp_status peer_pack(const fdp_transport *transport, const fdp_endpoint *home,
                            const fdp_segment *segments, int32_t segment_count,
                            const fdp_endpoint *targets, void *const *flats,
                            int32_t target_count) {
  peer_broadcast work = {.transport = (const peer_transport *)transport,
                         .home = home,
                         .targets = targets,
                         .flats = flats,
                         .target_count = target_count,
                         .leads = find_leads(home, targets, target_count),
                         .size_bytes = fdp_span_size_bytes(segments, segment_count)};
  fdp_status status = FDP_OK;
  if (segment_count == 0) return FDP_OK;
  for (int32_t i = 0; i < target_count; ++i) {
    if (is_at_home(&work, i)) FDP_TRY(fdp_endpoint_after(home, &targets[i]));
  }
  if (work.leads.count > 0) FDP_TRY(carry(&work, segments, segment_count));
  FDP_TRY(follow(&work));
  for (int32_t i = 0; i < target_count; ++i) {
    if (!is_at_home(&work, i)) continue;
    FDP_TRY(home->device->ops->pack(home->device, targets[i].stream, flats[i], segments,
                                    segment_count));
  }
  for (int32_t i = 0; i < target_count; ++i) {
    if (is_at_home(&work, i)) FDP_TRY(fdp_endpoint_after(&targets[i], home));
  }
done:
  return status;
}

/* --- sum --- */

typedef struct peer_reduction {
  const peer_transport *transport;
  const fdp_endpoint *home;
  const fdp_endpoint *ranks;
  int32_t rank_count;
  int64_t span_bytes;
  peer_leads leads;
  fdp_span_sums sums;
  fdp_segment *segments;               /* room for one per sum */
  fdp_buffer *flats[FDP_MAX_REPLICAS]; /* what a rank contributes, on its device */
  fdp_endpoint lanes[FDP_MAX_REPLICAS]; /* one per lead */
  int32_t lane_count;
} peer_reduction;

/* Packs what the rank contributes, on its own stream. A rank on home's device is read in place. */
static fdp_status bring_rank(peer_reduction *work, int32_t r) {
  const fdp_endpoint *rank = &work->ranks[r];
  fdp_status status = FDP_OK;
  if (rank->device != work->home->device) {
    int32_t count = fdp_span_segments(&work->sums, r, work->segments);
    if (count == 0) return FDP_OK;
    FDP_TRY(fdp_pool_take_deep(rank->pool, work->span_bytes, fdp_endpoint_ref(rank),
                               &work->flats[r]));
    void *flat = work->flats[r]->data;
    FDP_TRY(rank->device->ops->pack(rank->device, rank->stream, flat, work->segments, count));
    fdp_span_move(&work->sums, r, flat);
  }
  FDP_TRY(fdp_endpoint_after(rank, work->home));
done:
  return status;
}

static fdp_status enqueue_sums(const fdp_endpoint *endpoint, const fdp_span_sums *sums) {
  if (sums->count == 0) return FDP_OK;
  return endpoint->device->ops->sum(endpoint->device, endpoint->stream, sums->sums, sums->count);
}

/* A lane on each device sums one shard over all ranks and writes it to home. Home's stream is the
 * hub: it has waited for all ranks, the lanes wait for it, and it waits for the lanes. */
static fdp_status sum_shards(peer_reduction *work) {
  const fdp_span_sums *sums = &work->sums;
  fdp_span_sums shard = {0};
  int32_t count = work->leads.count;
  fdp_status status;
  FDP_TRY(fdp_span_sums_open(&shard, sums->sums, sums->count, sums->rank_count, sums->span));
  for (int32_t i = 0; i < count; ++i) {
    const fdp_endpoint *lead = &work->ranks[work->leads.indices[i]];
    FDP_TRY(fdp_lane_of(work->transport->lanes, lead, &work->lanes[i]));
    work->lane_count = i + 1;
    FDP_TRY(fdp_endpoint_after(work->home, &work->lanes[i]));
  }
  for (int32_t i = 0; i < count; ++i) {
    fdp_span_cut(sums, fdp_span_shard_begin(work->span_bytes, count, i),
                 fdp_span_shard_begin(work->span_bytes, count, i + 1), &shard);
    FDP_TRY(enqueue_sums(&work->lanes[i], &shard));
  }
  for (int32_t i = 0; i < count; ++i) {
    FDP_TRY(fdp_endpoint_after(&work->lanes[i], work->home));
  }
done:
  fdp_span_sums_close(&shard);
  return status;
}

static fdp_status give_flat(const peer_reduction *work, int32_t r, fdp_status status) {
  fdp_stream_ref users[FDP_POOL_MAX_USERS] = {fdp_endpoint_ref(work->home)};
  int32_t count = 1;
  if (status != FDP_OK) {
    users[count++] = fdp_endpoint_ref(&work->ranks[r]);
    for (int32_t i = 0; i < work->lane_count; ++i) {
      users[count++] = fdp_endpoint_ref(&work->lanes[i]);
    }
  }
  return fdp_pool_give_many(work->ranks[r].pool, work->flats[r], users, count, status);
}

static fdp_status peer_sum(const fdp_transport *transport, const fdp_endpoint *home,
                           const fdp_endpoint *ranks, int32_t rank_count, const fdp_sum *sums,
                           int32_t sum_count, void *span, int64_t span_bytes) {
  peer_reduction work = {.transport = (const peer_transport *)transport,
                         .home = home,
                         .ranks = ranks,
                         .rank_count = rank_count,
                         .span_bytes = span_bytes,
                         .leads = find_leads(home, ranks, rank_count)};
  fdp_status status;
  if (sum_count == 0) return FDP_OK;
  FDP_TRY(fdp_span_sums_open(&work.sums, sums, sum_count, rank_count, span));
  work.segments = malloc((size_t)sum_count * sizeof *work.segments);
  if (!work.segments) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory for %d segments", sum_count);
    goto done;
  }
  for (int32_t r = 0; r < rank_count; ++r) FDP_TRY(bring_rank(&work, r));
  FDP_TRY(is_sharded(&work.leads, span_bytes) ? sum_shards(&work)
                                              : enqueue_sums(home, &work.sums));
  for (int32_t r = 0; r < rank_count; ++r) {
    if (ranks[r].device == home->device) FDP_TRY(fdp_endpoint_after(home, &ranks[r]));
  }
done:
  for (int32_t r = 0; r < rank_count; ++r) status = give_flat(&work, r, status);
  free(work.segments);
  fdp_span_sums_close(&work.sums);
  return status;
}

static const fdp_transport_ops peer_ops = {
    .name = "peer",
    .close = peer_close,
    .joins = peer_joins,
    .copy = peer_copy,
    .pack = peer_pack,
    .sum = peer_sum,
};

fdp_peer_book *fdp_transport_peer_book(const fdp_transport *transport) {
  return ((const peer_transport *)transport)->book;
}

fdp_status fdp_transport_peer_open(int64_t timeout_ms, fdp_transport **transport) {
  peer_transport *opened = calloc(1, sizeof *opened);
  fdp_status status;
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory for the transport");
  opened->base.ops = &peer_ops;
  FDP_TRY(fdp_lanes_open(&opened->lanes));
  FDP_TRY(fdp_peer_book_open(timeout_ms, &opened->book));
  *transport = &opened->base;
  opened = NULL;
done:
  if (opened) peer_close(&opened->base);
  return status;
}
