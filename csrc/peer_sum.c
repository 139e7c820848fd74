#include "peer_sum.h"

#include <stdlib.h>

#include "peer_leads.h"
#include "span.h"

enum { WORD_BYTES = 16 }; /* what a kernel reads at once */

typedef struct peer_reduction {
  fdp_lanes *lanes;
  const fdp_endpoint *home;
  const fdp_endpoint *ranks;
  int32_t rank_count;
  int64_t span_bytes;
  fdp_peer_leads leads;
  fdp_span_sums sums;
  fdp_span_sums part; /* of them: a shard, a chunk */
  fdp_segment *segments;               /* room for one per sum */
  fdp_buffer *flats[FDP_MAX_REPLICAS]; /* what a rank contributes, on its device */
  bool in_place[FDP_MAX_REPLICAS];     /* it is read where it lies, and home waits for it */
  fdp_endpoint lane_ends[FDP_MAX_REPLICAS]; /* one per lead */
  int32_t lane_count;
} peer_reduction;

static bool is_at_home(const peer_reduction *work, int32_t r) {
  return work->ranks[r].device == work->home->device;
}

/* Note "lone tensors". A large bucket of one tensor is packed already: a copy of it would pass
 * through its GPU's memory twice, and hold up the sum. The rank's stream waits for the sum instead.
 * In words of another alignment than the target's it would be slow to read over a link. */
static bool can_stay(const peer_reduction *work, const fdp_span_sums *sums, int32_t r) {
  const fdp_sum *sum = &sums->sums[0];
  uintptr_t difference = (uintptr_t)sum->target ^ (uintptr_t)sum->sources[r];
  return work->sums.count == 1 && work->span_bytes >= FDP_PEER_STAY_BYTES && sum->sources[r] &&
         difference % WORD_BYTES == 0;
}

/* Packs what the rank contributes to the sums, on its own stream, and lets home wait for it. */
static fdp_status bring_rank(peer_reduction *work, int32_t r, fdp_span_sums *sums) {
  const fdp_endpoint *rank = &work->ranks[r];
  fdp_status status = FDP_OK;
  if (work->in_place[r]) return FDP_OK;
  if (can_stay(work, sums, r)) {
    work->in_place[r] = true;
    return fdp_endpoint_after(rank, work->home);
  }
  int32_t count = fdp_span_segments(sums, r, work->segments);
  if (count == 0) return FDP_OK;
  if (!work->flats[r]) {
    FDP_TRY(fdp_pool_take_deep(rank->pool, work->span_bytes, fdp_endpoint_ref(rank),
                               &work->flats[r]));
  }
  void *flat = work->flats[r]->data;
  FDP_TRY(rank->device->ops->pack(rank->device, rank->stream, flat, work->segments, count));
  fdp_span_move(sums, r, flat);
  FDP_TRY(fdp_endpoint_after(rank, work->home));
done:
  return status;
}

/* Of all ranks but those on home's device, which are read in place. */
static fdp_status bring_ranks(peer_reduction *work, fdp_span_sums *sums) {
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r < work->rank_count; ++r) {
    if (!is_at_home(work, r)) FDP_TRY(bring_rank(work, r, sums));
  }
done:
  return status;
}

static fdp_status enqueue_sums(const fdp_endpoint *endpoint, const fdp_span_sums *sums) {
  if (sums->count == 0) return FDP_OK;
  for (int32_t i = 0; i < sums->count; ++i) sums->sums[i].over_link = true;
  return endpoint->device->ops->sum(endpoint->device, endpoint->stream, sums->sums, sums->count);
}

/* A lane on each device sums one shard over all ranks and writes it to home. Home's stream is the
 * hub: it has waited for all ranks, the lanes wait for it, and it waits for the lanes. */
static fdp_status sum_shards(peer_reduction *work) {
  fdp_span_sums *sums = &work->sums, *shard = &work->part;
  int32_t count = work->leads.count;
  fdp_status status;
  FDP_TRY(bring_ranks(work, sums));
  for (int32_t i = 0; i < count; ++i) {
    const fdp_endpoint *lead = &work->ranks[work->leads.indices[i]];
    FDP_TRY(fdp_lane_of(work->lanes, lead, &work->lane_ends[i]));
    work->lane_count = i + 1;
    FDP_TRY(fdp_endpoint_after(work->home, &work->lane_ends[i]));
  }
  for (int32_t i = 0; i < count; ++i) {
    fdp_span_cut(sums, fdp_span_shard_begin(work->span_bytes, count, i),
                 fdp_span_shard_begin(work->span_bytes, count, i + 1), shard);
    FDP_TRY(enqueue_sums(&work->lane_ends[i], shard));
  }
  for (int32_t i = 0; i < count; ++i) {
    FDP_TRY(fdp_endpoint_after(&work->lane_ends[i], work->home));
  }
done:
  for (int32_t i = 0; i < work->lane_count && status != FDP_OK; ++i) {
    status = fdp_endpoint_settle(&work->lane_ends[i], work->home, status);
  }
  return status;
}

/* Note "chunks". */
static fdp_status sum_chunks(peer_reduction *work) {
  int32_t count = fdp_peer_chunk_count(work->span_bytes);
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < count; ++i) {
    fdp_span_cut(&work->sums, fdp_span_shard_begin(work->span_bytes, count, i),
                 fdp_span_shard_begin(work->span_bytes, count, i + 1), &work->part);
    FDP_TRY(bring_ranks(work, &work->part));
    FDP_TRY(enqueue_sums(work->home, &work->part));
  }
done:
  return status;
}

static fdp_status give_flat(const peer_reduction *work, int32_t r, fdp_status status) {
  fdp_stream_ref users[FDP_POOL_MAX_USERS] = {fdp_endpoint_ref(work->home)};
  int32_t count = 1;
  if (status != FDP_OK) users[count++] = fdp_endpoint_ref(&work->ranks[r]);
  return fdp_pool_give_many(work->ranks[r].pool, work->flats[r], users, count, status);
}

fdp_status fdp_peer_sum(fdp_lanes *lanes, const fdp_endpoint *home, const fdp_endpoint *ranks,
                        int32_t rank_count, const fdp_sum *sums, int32_t sum_count, void *span,
                        int64_t span_bytes) {
  peer_reduction work = {.lanes = lanes,
                         .home = home,
                         .ranks = ranks,
                         .rank_count = rank_count,
                         .span_bytes = span_bytes,
                         .leads = fdp_peer_leads_find(home, ranks, rank_count)};
  fdp_status status;
  if (sum_count == 0) return FDP_OK;
  FDP_TRY(fdp_span_sums_open(&work.sums, sums, sum_count, rank_count, span));
  FDP_TRY(fdp_span_sums_open(&work.part, sums, sum_count, rank_count, span));
  work.segments = malloc((size_t)sum_count * sizeof *work.segments);
  if (!work.segments) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory for %d segments", sum_count);
    goto done;
  }
  for (int32_t r = 0; r < rank_count; ++r) {
    if (is_at_home(&work, r)) FDP_TRY(fdp_endpoint_after(&ranks[r], home));
  }
  FDP_TRY(fdp_peer_is_sharded(&work.leads, span_bytes) ? sum_shards(&work) : sum_chunks(&work));
  for (int32_t r = 0; r < rank_count; ++r) {
    if (is_at_home(&work, r) || work.in_place[r]) FDP_TRY(fdp_endpoint_after(home, &ranks[r]));
  }
done:
  for (int32_t r = 0; r < rank_count; ++r) status = give_flat(&work, r, status);
  free(work.segments);
  fdp_span_sums_close(&work.part);
  fdp_span_sums_close(&work.sums);
  return status;
}
