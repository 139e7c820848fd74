#include <stdlib.h>

#include "bucket_slots.h"
#include "checks.h"
#include "counters.h"
#include "fault.h"
#include "recorder.h"
#include "stage.h"

static const char verb[] = "bucket_reduce";

/* What one call works on. gradients[r * bucket->count + k] as in bucket.h. */
typedef struct bucket_reduction {
  const fdp_bucket *bucket;
  const fdp_view *const *gradients;
  int32_t rank_count;
  const fdp_view *flat;
  fdp_stream *flat_stream;
  const char *flat_begin; /* extent of flat, once it has been checked */
  const char *flat_end;
} bucket_reduction;

/* Where the ranks are. */
typedef struct bucket_ranks {
  fdp_device_id devices[FDP_MAX_REPLICAS];
  fdp_stream *streams[FDP_MAX_REPLICAS];
} bucket_ranks;

static fdp_status check_gradient(const bucket_reduction *work, int32_t rank, int32_t index,
                                 const fdp_view *first) {
  const fdp_view *gradient = work->gradients[(int64_t)rank * work->bucket->count + index];
  const bucket_slot *slot = &work->bucket->slots[index];
  fdp_status status = fdp_bucket_check_tensor(work->bucket, index, gradient, verb, "gradients",
                                              rank, index);
  if (status != FDP_OK) return status;
  if (!fdp_device_equal(gradient->device, first->device)) {
    char text[32], first_text[32];
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: gradients[%d][%d] lies on %s, must lie on %s as the "
                    "rank's first", verb, rank, index,
                    fdp_device_text(gradient->device, text, sizeof text),
                    fdp_device_text(first->device, first_text, sizeof first_text));
  }
  const char *begin, *end;
  fdp_bucket_slot_extent(slot, gradient, &begin, &end);
  if (begin >= work->flat_end || work->flat_begin >= end) return FDP_OK;
  if (!fdp_views_overlap(gradient, work->flat)) return FDP_OK; /* other memory, or empty */
  /* A gradient may be the very slot that it is added up in. */
  if (gradient->data == (char *)work->flat->data + slot->offset_bytes &&
      fdp_bucket_slot_has_layout(slot, gradient)) {
    return FDP_OK;
  }
  return fdp_fail(FDP_INVALID_ARGUMENT, "%s: gradients[%d][%d] overlaps flat, must not unless it "
                  "is slot %d of it", verb, rank, index, index);
}

/* Also finds where each rank is: on its first gradient's device, and with the flat, on its stream,
 * if it has none. */
static fdp_status check(bucket_reduction *work, bucket_ranks *ranks) {
  fdp_status status;
  char text[48];
  if (!fdp_dtype_can_sum(work->bucket->dtype)) {
    return fdp_fail(FDP_INVALID_TYPE, "%s: bucket is %s, must be a dtype that can be summed", verb,
                    fdp_dtype_name(work->bucket->dtype, text, sizeof text));
  }
  FDP_TRY(fdp_bucket_check_flat(work->bucket, work->flat, verb, "flat", -1));
  fdp_view_extent(work->flat, &work->flat_begin, &work->flat_end);
  for (int32_t r = 0; r < work->rank_count; ++r) {
    const fdp_view *first = NULL;
    for (int32_t k = 0; k < work->bucket->count; ++k) {
      const fdp_view *gradient = work->gradients[(int64_t)r * work->bucket->count + k];
      if (!gradient) continue;
      if (!first) first = gradient;
      FDP_TRY(check_gradient(work, r, k, first));
    }
    ranks->devices[r] = first ? first->device : work->flat->device;
    if (!first) ranks->streams[r] = work->flat_stream;
  }
done:
  return status;
}

/* Stages what of rank `rank` has another layout than its slot, and notes every gradient's address
 * for the sums: sources[slot * rank_count + rank], counting only slots that have elements. */
static fdp_status bring_rank(const bucket_reduction *work, int32_t rank,
                             const fdp_endpoint *endpoint, fdp_stage *stage,
                             const void **sources) {
  const fdp_bucket *bucket = work->bucket;
  const fdp_view *const *gradients = work->gradients + (int64_t)rank * bucket->count;
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  fdp_status status = FDP_OK;
  int64_t staged_bytes = 0;
  int64_t used_bytes = 0;
  for (int32_t k = 0; k < bucket->count; ++k) {
    const bucket_slot *slot = &bucket->slots[k];
    if (!gradients[k] || fdp_bucket_slot_has_layout(slot, gradients[k])) continue;
    staged_bytes += fdp_stage_room_bytes(slot->size_bytes);
  }
  if (staged_bytes > 0) FDP_TRY(fdp_stage_open(stage, endpoint, staged_bytes));
  const void **source = sources + rank;
  for (int32_t k = 0; k < bucket->count; ++k) {
    const bucket_slot *slot = &bucket->slots[k];
    if (slot->size_bytes == 0) continue;
    void *address = gradients[k] ? gradients[k]->data : NULL;
    if (gradients[k] && !fdp_bucket_slot_has_layout(slot, gradients[k])) {
      fdp_view layout = fdp_bucket_slot(bucket, k, NULL, gradients[k]->device);
      FDP_TRY(fdp_stage_plan(stage, &list, gradients[k], &layout, &used_bytes, &address));
    }
    *source = address;
    source += work->rank_count;
  }
  FDP_TRY(fdp_stage_run(stage, &list));
done:
  fdp_copy_list_drop(&list);
  return status;
}

static int32_t plan_sums(const bucket_reduction *work, fdp_sum *sums, const void **sources,
                         int64_t *size_bytes) {
  int32_t count = 0;
  *size_bytes = 0;
  for (int32_t k = 0; k < work->bucket->count; ++k) {
    const bucket_slot *slot = &work->bucket->slots[k];
    if (slot->size_bytes == 0) continue;
    sums[count] = (fdp_sum){
        .target = (char *)work->flat->data + slot->offset_bytes,
        .sources = sources + (int64_t)count * work->rank_count,
        .source_count = work->rank_count,
        .count_elems = slot->count_elems,
        .dtype = work->bucket->dtype,
    };
    *size_bytes += slot->size_bytes;
    ++count;
  }
  return count;
}

static fdp_status run(const bucket_reduction *work, const fdp_party *party, fdp_sum *sums) {
  const void **sources = (const void **)(sums + work->bucket->count);
  fdp_stage stages[FDP_MAX_REPLICAS] = {0};
  int64_t size_bytes = 0;
  int32_t sum_count = plan_sums(work, sums, sources, &size_bytes);
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r < work->rank_count; ++r) {
    FDP_TRY(bring_rank(work, r, &party->others[r], &stages[r], sources));
  }
  FDP_TRY(party->transport->ops->sum(party->transport, &party->home, party->others,
                                     work->rank_count, sums, sum_count, work->flat->data,
                                     work->bucket->size_bytes));
  fdp_counters_add(FDP_VERB_BUCKET_REDUCE, size_bytes, sum_count);
done:
  for (int32_t r = 0; r < work->rank_count; ++r) {
    status = fdp_stage_close(&stages[r], status, &party->home, 1);
  }
  return status;
}

fdp_status fdp_bucket_reduce(fdp_context *context, const fdp_bucket *bucket,
                             const fdp_view *const *gradients, fdp_stream *const *rank_streams,
                             int32_t rank_count, const fdp_view *flat, fdp_stream *flat_stream) {
  bucket_reduction work = {bucket, gradients, rank_count, flat, flat_stream, NULL, NULL};
  bucket_ranks ranks;
  fdp_party party;
  fdp_sum *sums = NULL;
  int64_t record = fdp_recorder_begin(FDP_VERB_BUCKET_REDUCE, bucket->number, bucket->size_bytes,
                                      flat->device, flat_stream, rank_count);
  fdp_status status;
  FDP_TRY(fdp_fault_check(FDP_FAULT_BUCKET_REDUCE));
  FDP_TRY(fdp_check_count(verb, "ranks", rank_count));
  for (int32_t r = 0; r < rank_count; ++r) ranks.streams[r] = rank_streams ? rank_streams[r] : NULL;
  FDP_TRY(check(&work, &ranks));
  FDP_TRY(fdp_context_party(context, bucket->transport, flat->device, flat_stream, ranks.devices,
                            ranks.streams, rank_count, &party));
  size_t count = (size_t)bucket->count;
  sums = malloc(count * sizeof *sums + count * (size_t)rank_count * sizeof(void *));
  if (!sums) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "%s: no host memory for %d sums", verb, bucket->count);
    goto done;
  }
  FDP_TRY(run(&work, &party, sums));
done:
  free(sums);
  fdp_recorder_end(record, status);
  return status;
}
