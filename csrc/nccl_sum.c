#include "nccl_sum.h"

#include <stdlib.h>

#include "span.h"

/* Scratch that is taken for a call. Arrays have room for all sums. */
typedef struct sum_scratch {
  fdp_span_sums sums;
  fdp_span_sums share;       /* of one seat */
  fdp_segment *segments;     /* sum_count */
  fdp_segment *filled;       /* 2 * sum_count + 1 */
  fdp_nccl_act *acts;        /* twice the ranks, and one for home */
  int32_t act_count;
  const fdp_endpoint *leads[FDP_NCCL_MAX_SEATS]; /* who acts for a seat */
  fdp_buffer *flats[FDP_NCCL_MAX_SEATS];         /* of seats; when gathering, of ranks */
  fdp_buffer *arrivals[FDP_MAX_REPLICAS];        /* when gathering: what came from a rank */
} sum_scratch;

/* --- what NCCL can sum --- */

typedef struct sum_dtype {
  fdp_dtype dtype;
  fdp_nccl_dtype number;
  int32_t parts; /* numbers of NCCL's in an element */
} sum_dtype;

static const sum_dtype *dtype_of(const fdp_nccl_sum *work) {
  static const sum_dtype known[] = {
      {{FDP_CODE_FLOAT, 64, 1}, FDP_NCCL_FLOAT64, 1},
      {{FDP_CODE_FLOAT, 32, 1}, FDP_NCCL_FLOAT32, 1},
      {{FDP_CODE_FLOAT, 16, 1}, FDP_NCCL_FLOAT16, 1},
      {{FDP_CODE_BFLOAT, 16, 1}, FDP_NCCL_BFLOAT16, 1},
      {{FDP_CODE_COMPLEX, 128, 1}, FDP_NCCL_FLOAT64, 2},
      {{FDP_CODE_COMPLEX, 64, 1}, FDP_NCCL_FLOAT32, 2},
      {{FDP_CODE_COMPLEX, 32, 1}, FDP_NCCL_FLOAT16, 2},
      {{FDP_CODE_INT, 64, 1}, FDP_NCCL_INT64, 1},
      {{FDP_CODE_INT, 32, 1}, FDP_NCCL_INT32, 1},
      {{FDP_CODE_INT, 8, 1}, FDP_NCCL_INT8, 1},
      {{FDP_CODE_UINT, 64, 1}, FDP_NCCL_UINT64, 1},
      {{FDP_CODE_UINT, 32, 1}, FDP_NCCL_UINT32, 1},
      {{FDP_CODE_UINT, 8, 1}, FDP_NCCL_UINT8, 1},
  };
  for (int32_t k = 1; k < work->sum_count; ++k) {
    if (!fdp_dtype_equal(work->sums[k].dtype, work->sums[0].dtype)) return NULL;
  }
  for (size_t i = 0; i < sizeof known / sizeof known[0]; ++i) {
    if (fdp_dtype_equal(known[i].dtype, work->sums[0].dtype)) return &known[i];
  }
  return NULL;
}

static bool home_has_rank(const fdp_nccl_sum *work) {
  const fdp_nccl_seats *seats = &work->session->seats;
  for (int32_t r = 0; r < work->rank_count; ++r) {
    if (seats->others[r] == seats->home) return true;
  }
  return false;
}

/* --- scratch --- */

static fdp_status scratch_open(const fdp_nccl_sum *work, sum_scratch *scratch) {
  size_t sum_count = (size_t)work->sum_count;
  fdp_status status;
  FDP_TRY(fdp_span_sums_open(&scratch->sums, work->sums, work->sum_count, work->rank_count,
                             work->span));
  FDP_TRY(fdp_span_sums_open(&scratch->share, work->sums, work->sum_count, work->rank_count,
                             work->span));
  scratch->segments = malloc(sum_count * sizeof *scratch->segments);
  scratch->filled = malloc((2 * sum_count + 1) * sizeof *scratch->filled);
  scratch->acts = malloc((2 * (size_t)work->rank_count + 1) * sizeof *scratch->acts);
  if (!scratch->segments || !scratch->filled || !scratch->acts) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "nccl: no host memory for %d sums", work->sum_count);
  }
done:
  return status;
}

static void scratch_close(sum_scratch *scratch) {
  free(scratch->acts);
  free(scratch->filled);
  free(scratch->segments);
  fdp_span_sums_close(&scratch->share);
  fdp_span_sums_close(&scratch->sums);
}

static fdp_status give(const fdp_endpoint *owner, fdp_buffer *buffer, fdp_status status) {
  fdp_stream_ref user = fdp_endpoint_ref(owner);
  return fdp_pool_give_many(owner->pool, buffer, &user, 1, status);
}

static fdp_status take(const fdp_endpoint *owner, int64_t size_bytes, fdp_buffer **buffer) {
  return fdp_pool_take(owner->pool, size_bytes, owner->stream, buffer);
}

/* --- reduce --- */

static int32_t ranks_at(const fdp_nccl_sum *work, int32_t seat, int32_t *first) {
  int32_t count = 0;
  for (int32_t r = work->rank_count - 1; r >= 0; --r) {
    if (work->session->seats.others[r] != seat) continue;
    *first = r;
    count += 1;
  }
  return count;
}

/* Of what is packed, what is in its place already: a gradient may be its own slot. */
static int32_t drop_in_place(fdp_segment *segments, int32_t count, const char *flat) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (segments[i].tensor != flat + segments[i].offset_bytes) segments[kept++] = segments[i];
  }
  return kept;
}

static fdp_status pack(const fdp_endpoint *lead, void *flat, const fdp_segment *segments,
                       int32_t count) {
  if (count == 0) return FDP_OK;
  return lead->device->ops->pack(lead->device, lead->stream, flat, segments, count);
}

/* Writes every byte of the seat's flat: its only rank's gradients, zeros elsewhere. */
static fdp_status pack_rank(const fdp_nccl_sum *work, sum_scratch *scratch, int32_t rank,
                            const fdp_endpoint *lead, char *flat) {
  int32_t count = fdp_span_segments(&scratch->sums, rank, scratch->segments);
  count = fdp_span_fill(scratch->segments, count, work->span_bytes, scratch->filled);
  count = drop_in_place(scratch->filled, count, flat);
  return pack(lead, flat, scratch->filled, count);
}

/* The same for several ranks, which are summed. */
static fdp_status sum_ranks(const fdp_nccl_sum *work, sum_scratch *scratch, int32_t seat,
                            const fdp_endpoint *lead, char *flat) {
  fdp_span_sums *share = &scratch->share;
  for (int32_t k = 0; k < work->sum_count; ++k) {
    const fdp_sum *sum = &work->sums[k];
    int64_t offset_bytes = (char *)sum->target - work->span;
    share->sums[k].target = flat + offset_bytes;
    for (int32_t r = 0; r < work->rank_count; ++r) {
      bool is_here = work->session->seats.others[r] == seat;
      share->sources[k * work->rank_count + r] = is_here ? sum->sources[r] : NULL;
    }
    scratch->segments[k] = (fdp_segment){
        .tensor = flat, /* any: only what lies between is filled */
        .offset_bytes = offset_bytes,
        .size_bytes = sum->count_elems * (int64_t)fdp_dtype_bytes(sum->dtype),
    };
  }
  int32_t gap_count = 0;
  int32_t count =
      fdp_span_fill(scratch->segments, work->sum_count, work->span_bytes, scratch->filled);
  for (int32_t i = 0; i < count; ++i) {
    if (!scratch->filled[i].tensor) scratch->filled[gap_count++] = scratch->filled[i];
  }
  fdp_status status;
  FDP_TRY(pack(lead, flat, scratch->filled, gap_count));
  FDP_TRY(lead->device->ops->sum(lead->device, lead->stream, share->sums, share->count));
done:
  return status;
}

/* Home's contributions are put together in the span itself, where the sum then is made; by then all
 * others on home's device have packed theirs, which may lie in the span. */
static fdp_status bring_seat(const fdp_nccl_sum *work, sum_scratch *scratch, int32_t seat,
                             const sum_dtype *dtype) {
  const fdp_nccl_seats *seats = &work->session->seats;
  int32_t first = 0;
  int32_t count = ranks_at(work, seat, &first);
  bool is_home = seat == seats->home;
  const fdp_endpoint *lead = is_home ? work->home : &work->ranks[first];
  char *flat = work->span;
  fdp_status status = FDP_OK;
  scratch->leads[seat] = lead;
  if (!is_home) {
    FDP_TRY(take(lead, work->span_bytes, &scratch->flats[seat]));
    flat = scratch->flats[seat]->data;
  }
  for (int32_t r = 0; r < work->rank_count; ++r) {
    bool precedes = seats->others[r] == seat || (is_home && work->ranks[r].device == lead->device);
    if (precedes) FDP_TRY(fdp_endpoint_after(&work->ranks[r], lead));
  }
  FDP_TRY(count == 1 ? pack_rank(work, scratch, first, lead, flat)
                     : sum_ranks(work, scratch, seat, lead, flat));
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(dtype->dtype);
  scratch->acts[scratch->act_count++] = (fdp_nccl_act){
      .verb = FDP_NCCL_REDUCE,
      .seat = seat,
      .peer = seats->home,
      .source = flat,
      .target = is_home ? flat : NULL,
      .count_elems = work->span_bytes / item_bytes * dtype->parts,
      .dtype = dtype->number,
      .stream = lead->stream,
  };
done:
  return status;
}

static fdp_status reduce(const fdp_nccl_sum *work, sum_scratch *scratch, const sum_dtype *dtype) {
  const fdp_nccl_seats *seats = &work->session->seats;
  fdp_status status = FDP_OK;
  for (int32_t seat = 0; seat < seats->count; ++seat) {
    if (seat != seats->home) FDP_TRY(bring_seat(work, scratch, seat, dtype));
  }
  FDP_TRY(bring_seat(work, scratch, seats->home, dtype));
  FDP_TRY(fdp_nccl_session_run(work->session, "reduce over", scratch->acts, scratch->act_count));
  for (int32_t r = 0; r < work->rank_count; ++r) {
    FDP_TRY(fdp_endpoint_after(scratch->leads[seats->others[r]], &work->ranks[r]));
  }
done:
  for (int32_t seat = 0; seat < seats->count && status != FDP_OK; ++seat) {
    if (!scratch->leads[seat]) continue;
    status = fdp_endpoint_settle(scratch->leads[seat], work->home, status);
  }
  for (int32_t seat = 0; seat < seats->count; ++seat) {
    if (!scratch->flats[seat]) continue;
    status = give(scratch->leads[seat], scratch->flats[seat], status);
  }
  return status;
}

/* --- gather and sum --- */

static fdp_status send_rank(const fdp_nccl_sum *work, sum_scratch *scratch, int32_t r) {
  const fdp_nccl_seats *seats = &work->session->seats;
  const fdp_endpoint *rank = &work->ranks[r], *home = work->home;
  fdp_status status;
  if (fdp_span_segments(&scratch->sums, r, scratch->segments) == 0) return FDP_OK;
  FDP_TRY(take(rank, work->span_bytes, &scratch->flats[r]));
  FDP_TRY(take(home, work->span_bytes, &scratch->arrivals[r]));
  FDP_TRY(pack_rank(work, scratch, r, rank, scratch->flats[r]->data));
  fdp_nccl_act act = {
      .verb = FDP_NCCL_SEND,
      .seat = seats->others[r],
      .peer = seats->home,
      .source = scratch->flats[r]->data,
      .count_elems = work->span_bytes,
      .dtype = FDP_NCCL_INT8,
      .stream = rank->stream,
  };
  scratch->acts[scratch->act_count++] = act;
  act.verb = FDP_NCCL_RECV;
  act.seat = seats->home;
  act.peer = seats->others[r];
  act.target = scratch->arrivals[r]->data;
  act.stream = home->stream;
  scratch->acts[scratch->act_count++] = act;
  fdp_span_move(&scratch->sums, r, act.target);
done:
  return status;
}

static fdp_status gather(const fdp_nccl_sum *work, sum_scratch *scratch) {
  const fdp_nccl_seats *seats = &work->session->seats;
  fdp_device *device = work->home->device;
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r < work->rank_count; ++r) {
    bool is_home = seats->others[r] == seats->home;
    FDP_TRY(is_home ? fdp_endpoint_after(&work->ranks[r], work->home)
                    : send_rank(work, scratch, r));
  }
  FDP_TRY(fdp_nccl_session_run(work->session, "gathering from", scratch->acts,
                               scratch->act_count));
  FDP_TRY(device->ops->sum(device, work->home->stream, scratch->sums.sums, scratch->sums.count));
  for (int32_t r = 0; r < work->rank_count; ++r) {
    if (seats->others[r] != seats->home) continue;
    FDP_TRY(fdp_endpoint_after(work->home, &work->ranks[r]));
  }
done:
  for (int32_t r = 0; r < work->rank_count; ++r) {
    status = give(&work->ranks[r], scratch->flats[r], status);
    status = give(work->home, scratch->arrivals[r], status);
  }
  return status;
}

fdp_status fdp_nccl_sum_run(const fdp_nccl_sum *work) {
  sum_scratch scratch = {.act_count = 0};
  const sum_dtype *dtype = dtype_of(work);
  bool reduces = work->session->set && work->session->is_exact && dtype && home_has_rank(work);
  fdp_status status = scratch_open(work, &scratch);
  if (status == FDP_OK) {
    status = reduces ? reduce(work, &scratch, dtype) : gather(work, &scratch);
  }
  scratch_close(&scratch);
  return status;
}
