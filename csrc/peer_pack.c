#include "peer_pack.h"

#include <stdlib.h>

#include "peer_leads.h"
#include "span.h"

typedef struct peer_broadcast {
  fdp_lanes *lanes;
  const fdp_endpoint *home;
  const fdp_endpoint *targets;
  void *const *flats;
  int32_t target_count;
  fdp_peer_leads leads;
  int64_t size_bytes;
  fdp_buffer *scratch; /* the bucket, on home */
  fdp_segment *filled; /* the segments and the gaps between them, and room for as many */
  fdp_segment *cut;
  int32_t filled_count;
} peer_broadcast;

static bool is_at_home(const peer_broadcast *work, int32_t index) {
  return work->targets[index].device == work->home->device;
}

/* Within the endpoint's device. */
static fdp_status copy_bytes(const fdp_endpoint *endpoint, void *target, const void *source,
                             int64_t size_bytes) {
  if (size_bytes == 0) return FDP_OK;
  return endpoint->device->ops->copy(endpoint->device, endpoint->stream, target, source,
                                     size_bytes);
}

/* From other devices, by a copy for each piece. */
static fdp_status pull_copies(const peer_broadcast *work, const fdp_endpoint *target, void *flat,
                              const fdp_segment *pieces, int32_t piece_count) {
  fdp_endpoint lane;
  fdp_status status = fdp_lane_enter(work->lanes, target, &lane);
  if (status != FDP_OK) return status;
  for (int32_t k = 0; k < piece_count; ++k) {
    FDP_TRY(copy_bytes(&lane, (char *)flat + pieces[k].offset_bytes, pieces[k].tensor,
                       pieces[k].size_bytes));
  }
done:
  return fdp_lane_leave(&lane, target, status);
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

/* Packs what lies in [begin, end) of the bucket into scratch. Gaps are filled, as the whole is
 * copied from here on. */
static fdp_status pack_scratch(const peer_broadcast *work, int64_t begin, int64_t end) {
  const fdp_endpoint *home = work->home;
  int32_t count = fdp_span_cut_segments(work->filled, work->filled_count, begin, end, work->cut);
  return home->device->ops->pack(home->device, home->stream, work->scratch->data, work->cut,
                                 count);
}

/* One launch on the target's device reads home's tensors: no scratch, no copy engine. The segments
 * alone are written, not the gaps, so nobody may copy the flat as a whole. */
static bool is_direct(const peer_broadcast *work) {
  int32_t away = 0;
  for (int32_t i = 0; i < work->target_count; ++i) away += !is_at_home(work, i);
  return away == 1 && work->size_bytes <= FDP_PEER_DIRECT_BYTES;
}

static fdp_status pull_directly(const peer_broadcast *work, const fdp_segment *segments,
                                int32_t segment_count) {
  int32_t lead = work->leads.indices[0];
  const fdp_endpoint *target = &work->targets[lead];
  fdp_status status;
  FDP_TRY(fdp_endpoint_after(work->home, target));
  FDP_TRY(target->device->ops->pack(target->device, target->stream, work->flats[lead], segments,
                                    segment_count));
  FDP_TRY(fdp_endpoint_after(target, work->home));
done:
  return status;
}

/* The leads' streams wait for `first`; */
static fdp_status start_leads(const peer_broadcast *work, const fdp_endpoint *first) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < work->leads.count; ++i) {
    FDP_TRY(fdp_endpoint_after(first, &work->targets[work->leads.indices[i]]));
  }
done:
  return status;
}

/* and `then` for all of them. */
static fdp_status await_leads(const peer_broadcast *work, const fdp_endpoint *then) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < work->leads.count; ++i) {
    FDP_TRY(fdp_endpoint_after(&work->targets[work->leads.indices[i]], then));
  }
done:
  return status;
}

/* Note "chunks". */
static fdp_status pull_chunks(const peer_broadcast *work) {
  int32_t count = fdp_peer_chunk_count(work->size_bytes);
  fdp_status status = FDP_OK;
  for (int32_t k = 0; k < count; ++k) {
    int64_t begin = fdp_span_shard_begin(work->size_bytes, count, k);
    int64_t end = fdp_span_shard_begin(work->size_bytes, count, k + 1);
    fdp_segment chunk = {(char *)work->scratch->data + begin, begin, end - begin};
    FDP_TRY(pack_scratch(work, begin, end));
    FDP_TRY(start_leads(work, work->home));
    for (int32_t i = 0; i < work->leads.count; ++i) {
      int32_t lead = work->leads.indices[i];
      FDP_TRY(pull_copies(work, &work->targets[lead], work->flats[lead], &chunk, 1));
    }
  }
done:
  return status;
}

/* Pieces of a bucket into the target's memory: by one launch, which reads all peers at once, or, of
 * a large bucket, by a copy for each. */
static fdp_status pull_pieces(const peer_broadcast *work, const fdp_endpoint *target, void *flat,
                              const fdp_segment *pieces, int32_t piece_count) {
  if (work->size_bytes <= FDP_PEER_GATHERED_BYTES) {
    return target->device->ops->pack(target->device, target->stream, flat, pieces, piece_count);
  }
  return pull_copies(work, target, flat, pieces, piece_count);
}

/* The bucket from all shards. Of two devices none starts with the same. */
static fdp_status pull_whole(const peer_broadcast *work, int32_t i, fdp_buffer *const *shards,
                             const int64_t *begins) {
  int32_t index = work->leads.indices[i], count = work->leads.count;
  fdp_segment pieces[FDP_MAX_REPLICAS];
  for (int32_t step = 0; step < count; ++step) {
    int32_t k = (i + step) % count;
    pieces[step] = (fdp_segment){shards[k]->data, begins[k], begins[k + 1] - begins[k]};
  }
  return pull_pieces(work, &work->targets[index], work->flats[index], pieces, count);
}

/* Every device pulls its shard from home into scratch; when all have theirs, each pulls the others'
 * from there. Events fan in and out through the hub, a lane on home's device: home's own stream
 * would be held up. No stream waits for another's reads of its flat, since nobody reads a flat. */
static fdp_status pull_shards(peer_broadcast *work, const fdp_endpoint *hub) {
  const fdp_endpoint *targets = work->targets;
  const fdp_peer_leads *leads = &work->leads;
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
    fdp_segment own = {(char *)work->scratch->data + begins[i], 0, size_bytes};
    FDP_TRY(pull_pieces(work, target, shards[i]->data, &own, 1));
    FDP_TRY(fdp_endpoint_after(target, hub));
  }
  FDP_TRY(start_leads(work, hub));
  for (int32_t i = 0; i < leads->count; ++i) FDP_TRY(pull_whole(work, i, shards, begins));
  FDP_TRY(await_leads(work, hub));
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
      int32_t lead = fdp_peer_lead_of(targets, i);
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

/* The bucket as one piece, in scratch: a single tensor, too. Else home's stream would have to wait
 * until all have read it, and with it the forward on home: for 154 MB 0.3 ms on two H200. */
static fdp_status plan_packed(peer_broadcast *work, const fdp_segment *segments,
                              int32_t segment_count) {
  size_t room = 2 * (size_t)segment_count + 1;
  work->filled = malloc(2 * room * sizeof *work->filled);
  if (!work->filled) return fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory for the segments");
  work->cut = work->filled + room;
  work->filled_count = fdp_span_fill(segments, segment_count, work->size_bytes, work->filled);
  return fdp_pool_take_deep(work->home->pool, work->size_bytes, fdp_endpoint_ref(work->home),
                            &work->scratch);
}

static fdp_status carry(peer_broadcast *work, const fdp_segment *segments, int32_t segment_count) {
  const fdp_endpoint *home = work->home;
  fdp_endpoint lane;
  const fdp_endpoint *hub = NULL;
  fdp_status status;
  if (fdp_peer_is_sharded(&work->leads, work->size_bytes)) {
    FDP_TRY(fdp_lane_of(work->lanes, home, &lane));
    hub = &lane;
  }
  FDP_TRY(plan_packed(work, segments, segment_count));
  if (hub) {
    FDP_TRY(pack_scratch(work, 0, work->size_bytes));
    FDP_TRY(start_leads(work, home));
  }
  FDP_TRY(hub ? pull_shards(work, hub) : pull_chunks(work));
done:
  free(work->filled);
  return give_back(work, home, work->scratch, hub, status);
}

fdp_status fdp_peer_pack(fdp_lanes *lanes, const fdp_endpoint *home, const fdp_segment *segments,
                         int32_t segment_count, const fdp_endpoint *targets, void *const *flats,
                         int32_t target_count) {
  peer_broadcast work = {.lanes = lanes,
                         .home = home,
                         .targets = targets,
                         .flats = flats,
                         .target_count = target_count,
                         .leads = fdp_peer_leads_find(home, targets, target_count),
                         .size_bytes = fdp_span_size_bytes(segments, segment_count)};
  fdp_status status = FDP_OK;
  if (segment_count == 0) return FDP_OK;
  for (int32_t i = 0; i < target_count; ++i) {
    if (is_at_home(&work, i)) FDP_TRY(fdp_endpoint_after(home, &targets[i]));
  }
  if (is_direct(&work)) {
    FDP_TRY(pull_directly(&work, segments, segment_count));
  } else if (work.leads.count > 0) {
    FDP_TRY(carry(&work, segments, segment_count));
  }
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
