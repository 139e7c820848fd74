#include "transport_nccl.h"

#include <assert.h>
#include <stdlib.h>

#include "nccl_sum.h"
#include "relay.h"
#include "span.h"

typedef struct nccl_transport {
  fdp_transport base;
  fdp_nccl_book *book;
} nccl_transport;

static fdp_nccl_book *book_of(const fdp_transport *transport) {
  return ((const nccl_transport *)transport)->book;
}

static void nccl_close(fdp_transport *transport) {
  fdp_nccl_book_close(book_of(transport));
  free(transport);
}

static fdp_status nccl_joins(const fdp_transport *transport, const fdp_endpoint *home,
                             const fdp_endpoint *others, int32_t other_count) {
  return fdp_nccl_book_joins(book_of(transport), home, others, other_count);
}

static fdp_status give(const fdp_endpoint *owner, fdp_buffer *buffer, fdp_status status) {
  fdp_stream_ref user = fdp_endpoint_ref(owner);
  return fdp_pool_give_many(owner->pool, buffer, &user, 1, status);
}

static fdp_nccl_act bytes_act(fdp_nccl_verb verb, int32_t seat, int32_t peer, const void *source,
                              void *target, int64_t size_bytes, fdp_stream *stream) {
  return (fdp_nccl_act){verb, seat, peer, source, target, size_bytes, FDP_NCCL_INT8, stream};
}

/* --- copy --- */

/* One transfer's way. Plain copies are sent as they are, others through flat scratch at both
 * ends. */
typedef struct nccl_route {
  const fdp_transfer *transfer;
  int32_t source_seat;
  int32_t target_seat;
  fdp_buffer *sent;
  fdp_buffer *got;
  int64_t size_bytes; /* of those */
} nccl_route;

typedef struct nccl_copy {
  fdp_nccl_session session;
  nccl_route routes[FDP_MAX_REPLICAS];
  int32_t route_count;
  fdp_nccl_act *acts;
  int32_t act_count;
  fdp_strided_copy *halves; /* room for the copies of any one transfer */
} nccl_copy;

static bool is_relayed(const nccl_route *route) {
  return !fdp_relay_is_plain(route->transfer->copies, route->transfer->copy_count);
}

static bool is_local(const nccl_route *route) { return route->source_seat == route->target_seat; }

/* Home is the side that all transfers share, as in the verbs. */
static bool source_is_home(const fdp_transfer *transfers, int32_t transfer_count) {
  for (int32_t i = 1; i < transfer_count; ++i) {
    if (!fdp_endpoint_equal(&transfers[i].source, &transfers[0].source)) return false;
  }
  return true;
}

static fdp_status run_half(nccl_copy *work, const nccl_route *route, fdp_relay_half half) {
  const fdp_transfer *transfer = route->transfer;
  bool gathers = half == FDP_RELAY_GATHER;
  const fdp_endpoint *endpoint = gathers ? &transfer->source : &transfer->target;
  fdp_buffer *flat = gathers ? route->sent : route->got;
  fdp_relay_plan(transfer->copies, transfer->copy_count, half, flat->data, work->halves);
  return fdp_endpoint_copy(endpoint, work->halves, transfer->copy_count);
}

static void add_pair(nccl_copy *work, const nccl_route *route, const void *source, void *target,
                     int64_t size_bytes) {
  const fdp_transfer *transfer = route->transfer;
  int32_t from = route->source_seat, to = route->target_seat;
  if (size_bytes == 0) return;
  work->acts[work->act_count++] = bytes_act(FDP_NCCL_SEND, from, to, source, NULL, size_bytes,
                                            transfer->source.stream);
  work->acts[work->act_count++] = bytes_act(FDP_NCCL_RECV, to, from, NULL, target, size_bytes,
                                            transfer->target.stream);
}

/* What goes before the group: gathering into scratch, and waits of targets for local sources. */
static fdp_status prepare(nccl_copy *work, nccl_route *route) {
  const fdp_transfer *transfer = route->transfer;
  const fdp_endpoint *source = &transfer->source, *target = &transfer->target;
  fdp_status status = FDP_OK;
  if (is_local(route)) return fdp_endpoint_after(source, target);
  if (!is_relayed(route)) {
    for (int32_t i = 0; i < transfer->copy_count; ++i) {
      const fdp_strided_copy *copy = &transfer->copies[i];
      add_pair(work, route, copy->source, copy->target, copy->item_bytes);
    }
    return FDP_OK;
  }
  route->size_bytes = fdp_relay_size_bytes(transfer->copies, transfer->copy_count);
  FDP_TRY(fdp_pool_take(source->pool, route->size_bytes, source->stream, &route->sent));
  FDP_TRY(fdp_pool_take(target->pool, route->size_bytes, target->stream, &route->got));
  FDP_TRY(run_half(work, route, FDP_RELAY_GATHER));
  add_pair(work, route, route->sent->data, route->got->data, route->size_bytes);
done:
  return status;
}

static fdp_status finish(nccl_copy *work, const nccl_route *route) {
  const fdp_transfer *transfer = route->transfer;
  if (is_local(route)) {
    return fdp_endpoint_copy(&transfer->target, transfer->copies, transfer->copy_count);
  }
  return route->got ? run_half(work, route, FDP_RELAY_SPREAD) : FDP_OK;
}

static fdp_status run_routes(nccl_copy *work) {
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < work->route_count; ++i) FDP_TRY(prepare(work, &work->routes[i]));
  FDP_TRY(fdp_nccl_session_run(&work->session, "copying between", work->acts, work->act_count));
  for (int32_t i = 0; i < work->route_count; ++i) FDP_TRY(finish(work, &work->routes[i]));
  for (int32_t i = 0; i < work->route_count; ++i) {
    const fdp_transfer *transfer = work->routes[i].transfer;
    if (!is_local(&work->routes[i])) continue;
    FDP_TRY(fdp_endpoint_after(&transfer->target, &transfer->source));
  }
done:
  for (int32_t i = 0; i < work->route_count; ++i) {
    status = give(&work->routes[i].transfer->source, work->routes[i].sent, status);
    status = give(&work->routes[i].transfer->target, work->routes[i].got, status);
  }
  return status;
}

static fdp_status open_lists(nccl_copy *work, const fdp_transfer *transfers,
                             int32_t transfer_count) {
  size_t copy_count = 0, longest = 1;
  for (int32_t i = 0; i < transfer_count; ++i) {
    size_t count = (size_t)transfers[i].copy_count;
    copy_count += count > 0 ? count : 1;
    if (count > longest) longest = count;
  }
  work->acts = malloc(2 * copy_count * sizeof *work->acts);
  work->halves = malloc(longest * sizeof *work->halves);
  if (work->acts && work->halves) return FDP_OK;
  return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for %d transfers", transfer_count);
}

static fdp_status nccl_copy_run(const fdp_transport *transport, const fdp_transfer *transfers,
                                int32_t transfer_count) {
  nccl_copy work = {.act_count = 0};
  fdp_endpoint others[FDP_MAX_REPLICAS];
  assert(transfer_count > 0 && transfer_count <= FDP_MAX_REPLICAS);
  bool from_home = source_is_home(transfers, transfer_count);
  const fdp_endpoint *home = from_home ? &transfers[0].source : &transfers[0].target;
  for (int32_t i = 0; i < transfer_count; ++i) {
    others[i] = from_home ? transfers[i].target : transfers[i].source;
  }
  fdp_status status =
      fdp_nccl_book_enter(book_of(transport), home, others, transfer_count, &work.session);
  if (status != FDP_OK) return status;
  const fdp_nccl_seats *seats = &work.session.seats;
  FDP_TRY(open_lists(&work, transfers, transfer_count));
  for (int32_t i = 0; i < transfer_count; ++i) {
    nccl_route *route = &work.routes[i];
    route->transfer = &transfers[i];
    route->source_seat = from_home ? seats->home : seats->others[i];
    route->target_seat = from_home ? seats->others[i] : seats->home;
  }
  work.route_count = transfer_count;
  FDP_TRY(run_routes(&work));
done:
  free(work.halves);
  free(work.acts);
  fdp_nccl_book_leave(&work.session);
  return status;
}

/* --- pack --- */

typedef struct nccl_pack {
  fdp_nccl_session session;
  const fdp_endpoint *home;
  const fdp_endpoint *targets;
  void *const *flats;
  int32_t target_count;
  int64_t size_bytes;
  fdp_buffer *scratch; /* the bucket, on home */
} nccl_pack;

static bool is_at_home(const nccl_pack *work, int32_t i) {
  return work->session.seats.others[i] == work->session.seats.home;
}

/* The first target with the same seat. */
static int32_t lead_of(const nccl_pack *work, int32_t i) {
  const int32_t *seats = work->session.seats.others;
  int32_t lead = 0;
  while (seats[lead] != seats[i]) ++lead;
  return lead;
}

/* Gaps are filled, as the whole is sent. */
static fdp_status pack_scratch(nccl_pack *work, const fdp_segment *segments,
                               int32_t segment_count) {
  const fdp_endpoint *home = work->home;
  fdp_status status;
  fdp_segment *filled = malloc((2 * (size_t)segment_count + 1) * sizeof *filled);
  if (!filled) return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for the segments");
  int32_t count = fdp_span_fill(segments, segment_count, work->size_bytes, filled);
  FDP_TRY(fdp_pool_take(home->pool, work->size_bytes, home->stream, &work->scratch));
  FDP_TRY(home->device->ops->pack(home->device, home->stream, work->scratch->data, filled, count));
done:
  free(filled);
  return status;
}

/* All seats of the set broadcast; where the set has others too, each target is sent to. */
static int32_t plan_acts(const nccl_pack *work, fdp_nccl_act *acts) {
  int32_t home = work->session.seats.home, count = 0;
  void *scratch = work->scratch->data;
  fdp_stream *home_stream = work->home->stream;
  int64_t size_bytes = work->size_bytes;
  bool broadcasts = work->session.is_exact;
  if (broadcasts) {
    acts[count++] = bytes_act(FDP_NCCL_BROADCAST, home, home, scratch, scratch, size_bytes,
                              home_stream);
  }
  for (int32_t i = 0; i < work->target_count; ++i) {
    int32_t seat = work->session.seats.others[i];
    if (is_at_home(work, i) || lead_of(work, i) != i) continue;
    if (!broadcasts) {
      acts[count++] = bytes_act(FDP_NCCL_SEND, home, seat, scratch, NULL, size_bytes, home_stream);
    }
    acts[count++] = bytes_act(broadcasts ? FDP_NCCL_BROADCAST : FDP_NCCL_RECV, seat, home, scratch,
                              work->flats[i], size_bytes, work->targets[i].stream);
  }
  return count;
}

/* A seat's other targets copy the flat of its first. */
static fdp_status follow(const nccl_pack *work) {
  const fdp_endpoint *targets = work->targets;
  fdp_status status = FDP_OK;
  for (int32_t pass = 0; pass < 3; ++pass) {
    for (int32_t i = 0; i < work->target_count; ++i) {
      int32_t lead = lead_of(work, i);
      fdp_device *device = targets[i].device;
      if (lead == i || is_at_home(work, i)) continue;
      if (pass == 0) FDP_TRY(fdp_endpoint_after(&targets[lead], &targets[i]));
      if (pass == 1) {
        FDP_TRY(device->ops->copy(device, targets[i].stream, work->flats[i], work->flats[lead],
                                  work->size_bytes));
      }
      if (pass == 2) FDP_TRY(fdp_endpoint_after(&targets[i], &targets[lead]));
    }
  }
done:
  return status;
}

static fdp_status carry(nccl_pack *work, const fdp_segment *segments, int32_t segment_count) {
  fdp_nccl_act acts[2 * FDP_MAX_REPLICAS + 1];
  fdp_status status;
  FDP_TRY(pack_scratch(work, segments, segment_count));
  FDP_TRY(fdp_nccl_session_run(&work->session, "broadcast over", acts, plan_acts(work, acts)));
  FDP_TRY(follow(work));
done:
  return give(work->home, work->scratch, status);
}

static fdp_status nccl_pack_run(const fdp_transport *transport, const fdp_endpoint *home,
                                const fdp_segment *segments, int32_t segment_count,
                                const fdp_endpoint *targets, void *const *flats,
                                int32_t target_count) {
  nccl_pack work = {.home = home,
                    .targets = targets,
                    .flats = flats,
                    .target_count = target_count,
                    .size_bytes = fdp_span_size_bytes(segments, segment_count)};
  if (segment_count == 0) return FDP_OK;
  fdp_status status =
      fdp_nccl_book_enter(book_of(transport), home, targets, target_count, &work.session);
  if (status != FDP_OK) return status;
  for (int32_t i = 0; i < target_count; ++i) {
    if (is_at_home(&work, i)) FDP_TRY(fdp_endpoint_after(home, &targets[i]));
  }
  if (work.session.set) FDP_TRY(carry(&work, segments, segment_count));
  for (int32_t i = 0; i < target_count; ++i) {
    if (!is_at_home(&work, i)) continue;
    FDP_TRY(home->device->ops->pack(home->device, targets[i].stream, flats[i], segments,
                                    segment_count));
  }
  for (int32_t i = 0; i < target_count; ++i) {
    if (is_at_home(&work, i)) FDP_TRY(fdp_endpoint_after(&targets[i], home));
  }
done:
  fdp_nccl_book_leave(&work.session);
  return status;
}

/* --- sum --- */

static fdp_status nccl_sum_run(const fdp_transport *transport, const fdp_endpoint *home,
                               const fdp_endpoint *ranks, int32_t rank_count, const fdp_sum *sums,
                               int32_t sum_count, void *span, int64_t span_bytes) {
  fdp_nccl_session session;
  fdp_nccl_sum work = {&session, home, ranks, rank_count, sums, sum_count, span, span_bytes};
  if (sum_count == 0) return FDP_OK;
  fdp_status status = fdp_nccl_book_enter(book_of(transport), home, ranks, rank_count, &session);
  if (status != FDP_OK) return status;
  status = fdp_nccl_sum_run(&work);
  fdp_nccl_book_leave(&session);
  return status;
}

static const fdp_transport_ops nccl_ops = {
    .name = "nccl",
    .close = nccl_close,
    .joins = nccl_joins,
    .copy = nccl_copy_run,
    .pack = nccl_pack_run,
    .sum = nccl_sum_run,
};

fdp_status fdp_transport_nccl_open(int64_t timeout_ms, fdp_peer_book *peers,
                                   fdp_transport **transport) {
  nccl_transport *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for the transport");
  fdp_status status = fdp_nccl_book_open(timeout_ms, peers, &opened->book);
  if (status != FDP_OK) {
    free(opened);
    return status;
  }
  opened->base.ops = &nccl_ops;
  *transport = &opened->base;
  return FDP_OK;
}
