#include "peer_sum.h"

#include <stdlib.h>

#include "peer_leads.h"
#include "span.h"

enum { WORD_BYTES = 16 }; /* what a kernel reads at once */

/* How what a rank contributes is read by home, or by each device of a sharded sum. */
typedef enum peer_way {
  IN_PLACE, /* where it lies: home waits for the rank, and the rank for the sum */
  FETCHED,  /* from scratch on home, into which the rank's stream copies it */
  PACKED    /* from scratch on the rank's device, into which the rank's stream packs it */
} peer_way;

typedef struct peer_reduction {
  fdp_lanes *lanes;
  const fdp_endpoint *home;
  const fdp_endpoint *ranks;
  int32_t rank_count;
  int64_t span_bytes;
  fdp_peer_leads leads;
  bool is_sharded;
  bool over_link; /* where it is not: home reads memory of another device */
  fdp_span_sums sums;
  fdp_span_sums part; /* of them: a shard, a chunk */
  fdp_segment *segments; /* room for one per sum */
  peer_way ways[FDP_MAX_REPLICAS];
  fdp_buffer *flats[FDP_MAX_REPLICAS]; /* the scratch, once there is something in it */
  fdp_endpoint bringers[FDP_MAX_REPLICAS]; /* who fills it: the rank, or a lane (lane.h) */
  fdp_endpoint lane_ends[FDP_MAX_REPLICAS]; /* one per lead */
  int32_t lane_count;
} peer_reduction;

static bool is_at_home(const peer_reduction *work, int32_t r) {
  return work->ranks[r].device == work->home->device;
}

/* In words of another alignment than the target's it would be slow to read over a link. */
static bool is_aligned(const fdp_span_sums *sums, int32_t r) {
  for (int32_t k = 0; k < sums->count; ++k) {
    const fdp_sum *sum = &sums->sums[k];
    uintptr_t difference = (uintptr_t)sum->target ^ (uintptr_t)sum->sources[r];
    if (sum->sources[r] && difference % WORD_BYTES != 0) return false;
  }
  return true;
}

/* Note "in place". To pack large tensors takes them through their GPU's memory twice, and holds up
 * the sum: they are read where they lie, and the rank's stream waits for that. Several tensors are
 * only between two devices: with more, each rank would wait for the gradients of all the others,
 * and whether that is worth it was never measured. */
static bool can_stay(const peer_reduction *work, int32_t r) {
  int32_t count = work->sums.count;
  bool are_large = !work->is_sharded && work->span_bytes / count >= FDP_PEER_STAY_MEAN_BYTES;
  return work->span_bytes >= FDP_PEER_STAY_BYTES && (count == 1 || are_large) &&
         is_aligned(&work->sums, r);
}

/* Note "fetched tensors". A tensor that fills a very large bucket alone is often the last gradient
 * of a step, and home, which has more to do, is often later with its own than the others: nothing
 * hides that sum. So a copy engine brings the rank's to home as soon as it is there, and what is
 * left to do after home's is a sum within one GPU, chunk by chunk behind the copies. The rank's
 * stream reads its tensor itself, and waits for nobody. */
static peer_way way_of(const peer_reduction *work, int32_t r) {
  if (is_at_home(work, r)) return IN_PLACE;
  if (!can_stay(work, r)) return PACKED;
  bool is_lone = work->sums.count == 1 && !work->is_sharded;
  return is_lone && work->span_bytes >= FDP_PEER_FETCH_BYTES ? FETCHED : IN_PLACE;
}

static void choose_ways(peer_reduction *work) {
  for (int32_t r = 0; r < work->rank_count; ++r) {
    peer_way way = work->ways[r] = way_of(work, r);
    work->over_link |= way == PACKED || (way == IN_PLACE && !is_at_home(work, r));
  }
}

static const fdp_endpoint *flat_owner(const peer_reduction *work, int32_t r) {
  return work->ways[r] == FETCHED ? work->home : &work->ranks[r];
}

/* The scratch may be home's: the rank's stream waits for its former users, too. */
static fdp_status take_flat(peer_reduction *work, int32_t r) {
  const fdp_endpoint *rank = &work->ranks[r];
  fdp_status status = FDP_OK;
  if (work->flats[r]) return FDP_OK;
  work->bringers[r] = *rank;
  FDP_TRY(fdp_pool_take_deep(flat_owner(work, r)->pool, work->span_bytes, fdp_endpoint_ref(rank),
                             &work->flats[r]));
  if (work->ways[r] == FETCHED) FDP_TRY(fdp_lane_enter(work->lanes, rank, &work->bringers[r]));
done:
  return status;
}

/* Brings what the rank contributes to the sums to where it is read, and lets home wait for it. */
static fdp_status bring_rank(peer_reduction *work, int32_t r, fdp_span_sums *sums) {
  const fdp_segment *segments = work->segments;
  fdp_device *device = work->ranks[r].device;
  fdp_status status = FDP_OK;
  int32_t count = fdp_span_segments(sums, r, work->segments);
  if (count == 0) return FDP_OK;
  FDP_TRY(take_flat(work, r));
  char *flat = work->flats[r]->data;
  fdp_stream *stream = work->bringers[r].stream;
  if (work->ways[r] == FETCHED) { /* one tensor, so one segment */
    FDP_TRY(device->ops->copy(device, stream, flat + segments->offset_bytes, segments->tensor,
                              segments->size_bytes));
  } else {
    FDP_TRY(device->ops->pack(device, stream, flat, segments, count));
  }
  fdp_span_move(sums, r, flat);
  FDP_TRY(fdp_endpoint_after(&work->bringers[r], work->home));
done:
  return status;
}

static fdp_status bring_ranks(peer_reduction *work, fdp_span_sums *sums) {
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r < work->rank_count; ++r) {
    if (work->ways[r] != IN_PLACE) FDP_TRY(bring_rank(work, r, sums));
  }
done:
  return status;
}

static fdp_status enqueue_sums(const fdp_endpoint *endpoint, const fdp_span_sums *sums,
                               bool over_link) {
  if (sums->count == 0) return FDP_OK;
  for (int32_t i = 0; i < sums->count; ++i) sums->sums[i].over_link = over_link;
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
    FDP_TRY(enqueue_sums(&work->lane_ends[i], shard, true));
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

/* Notes "chunks" and "fetched tensors". */
static fdp_status sum_chunks(peer_reduction *work) {
  int32_t count = fdp_peer_chunk_count(work->span_bytes);
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r < work->rank_count; ++r) {
    if (work->ways[r] == FETCHED) count = fdp_peer_fetch_count(work->span_bytes);
  }
  for (int32_t i = 0; i < count; ++i) {
    fdp_span_cut(&work->sums, fdp_span_shard_begin(work->span_bytes, count, i),
                 fdp_span_shard_begin(work->span_bytes, count, i + 1), &work->part);
    FDP_TRY(bring_ranks(work, &work->part));
    FDP_TRY(enqueue_sums(work->home, &work->part, work->over_link));
  }
done:
  return status;
}

static fdp_status give_flat(const peer_reduction *work, int32_t r, fdp_status status) {
  fdp_stream_ref users[FDP_POOL_MAX_USERS] = {fdp_endpoint_ref(work->home)};
  int32_t count = 1;
  if (!work->flats[r]) return status;
  status = fdp_lane_leave(&work->bringers[r], &work->ranks[r], status);
  if (status != FDP_OK) users[count++] = fdp_endpoint_ref(&work->ranks[r]);
  return fdp_pool_give_many(flat_owner(work, r)->pool, work->flats[r], users, count, status);
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
  work.is_sharded = fdp_peer_is_sharded(&work.leads, span_bytes);
  choose_ways(&work);
  for (int32_t r = 0; r < rank_count; ++r) {
    if (work.ways[r] == IN_PLACE) FDP_TRY(fdp_endpoint_after(&ranks[r], home));
  }
  FDP_TRY(work.is_sharded ? sum_shards(&work) : sum_chunks(&work));
  for (int32_t r = 0; r < rank_count; ++r) {
    if (work.ways[r] == IN_PLACE) FDP_TRY(fdp_endpoint_after(home, &ranks[r]));
  }
done:
  for (int32_t r = 0; r < rank_count; ++r) status = give_flat(&work, r, status);
  free(work.segments);
  fdp_span_sums_close(&work.part);
  fdp_span_sums_close(&work.sums);
  return status;
}
