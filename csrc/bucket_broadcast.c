#include <stdlib.h>

#include "bucket_slots.h"
#include "checks.h"
#include "counters.h"
#include "fault.h"
#include "recorder.h"
#include "stage.h"

static const char verb[] = "bucket_broadcast";

/* The flats are written while all sources are read. Each extent is looked at once: this is most of
 * what checking a bucket of small tensors costs. */
static fdp_status check_apart(const fdp_bucket *bucket, const fdp_view *sources,
                              const fdp_view *flats, int32_t flat_count) {
  const char *flat_begins[FDP_MAX_REPLICAS], *flat_ends[FDP_MAX_REPLICAS];
  for (int32_t i = 0; i < flat_count; ++i) {
    fdp_view_extent(&flats[i], &flat_begins[i], &flat_ends[i]);
  }
  for (int32_t k = 0; k < bucket->count; ++k) {
    const char *begin, *end;
    fdp_bucket_slot_extent(&bucket->slots[k], &sources[k], &begin, &end);
    for (int32_t i = 0; i < flat_count; ++i) {
      if (begin >= flat_ends[i] || flat_begins[i] >= end) continue;
      if (!fdp_views_overlap(&flats[i], &sources[k])) continue; /* other memory, or empty */
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: flats[%d] overlaps sources[%d], must not", verb, i,
                      k);
    }
  }
  return FDP_OK;
}

static fdp_status check(const fdp_bucket *bucket, const fdp_view *sources, const fdp_view *flats,
                        int32_t flat_count) {
  fdp_status status;
  FDP_TRY(fdp_check_count(verb, "flats", flat_count));
  for (int32_t i = 0; i < flat_count; ++i) {
    FDP_TRY(fdp_bucket_check_flat(bucket, &flats[i], verb, "flats", i));
  }
  FDP_TRY(fdp_check_writable(verb, (fdp_named_views){"flats", flats, flat_count, false}));
  for (int32_t k = 0; k < bucket->count; ++k) {
    FDP_TRY(fdp_bucket_check_tensor(bucket, k, &sources[k], verb, "sources", k, -1));
    if (!fdp_device_equal(sources[k].device, sources[0].device)) {
      char text[32], home_text[32];
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: sources[%d] lies on %s, must lie on %s as "
                      "sources[0]", verb, k, fdp_device_text(sources[k].device, text, sizeof text),
                      fdp_device_text(sources[0].device, home_text, sizeof home_text));
    }
  }
  FDP_TRY(check_apart(bucket, sources, flats, flat_count));
done:
  return status;
}

/* One segment for each source that has elements. What has another layout than its slot goes through
 * a stage, once for all targets. Returns the number of segments by `segment_count`. */
static fdp_status plan(const fdp_bucket *bucket, const fdp_view *sources, const fdp_endpoint *home,
                       fdp_stage *stage, fdp_segment *segments, int32_t *segment_count) {
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  fdp_status status = FDP_OK;
  int64_t staged_bytes = 0;
  int64_t used_bytes = 0;
  for (int32_t k = 0; k < bucket->count; ++k) {
    const bucket_slot *slot = &bucket->slots[k];
    if (slot->size_bytes == 0 || fdp_bucket_slot_has_layout(slot, &sources[k])) continue;
    staged_bytes += fdp_stage_room_bytes(slot->size_bytes);
  }
  if (staged_bytes > 0) FDP_TRY(fdp_stage_open(stage, home, staged_bytes));
  int32_t count = 0;
  for (int32_t k = 0; k < bucket->count; ++k) {
    const bucket_slot *slot = &bucket->slots[k];
    if (slot->size_bytes == 0) continue;
    void *address = sources[k].data;
    if (!fdp_bucket_slot_has_layout(slot, &sources[k])) {
      fdp_view layout = fdp_bucket_slot(bucket, k, NULL, sources[k].device);
      FDP_TRY(fdp_stage_plan(stage, &list, &sources[k], &layout, &used_bytes, &address));
    }
    segments[count++] = (fdp_segment){address, slot->offset_bytes, slot->size_bytes};
  }
  FDP_TRY(fdp_stage_run(stage, &list));
  *segment_count = count;
done:
  fdp_copy_list_drop(&list);
  return status;
}

static int64_t tensor_bytes(const fdp_segment *segments, int32_t segment_count) {
  int64_t size_bytes = 0;
  for (int32_t i = 0; i < segment_count; ++i) size_bytes += segments[i].size_bytes;
  return size_bytes;
}

fdp_status fdp_bucket_broadcast(fdp_context *context, const fdp_bucket *bucket,
                                const fdp_view *sources, fdp_stream *home_stream,
                                const fdp_view *flats, fdp_stream *const *flat_streams,
                                int32_t flat_count) {
  fdp_party party;
  fdp_device_id devices[FDP_MAX_REPLICAS];
  void *addresses[FDP_MAX_REPLICAS];
  fdp_stage stage = {0};
  fdp_segment *segments = NULL;
  int32_t segment_count = 0;
  int64_t record = fdp_recorder_begin(FDP_VERB_BUCKET_BROADCAST, bucket->number, bucket->size_bytes,
                                      sources[0].device, home_stream, flat_count);
  fdp_status status;
  FDP_TRY(fdp_fault_check(FDP_FAULT_BUCKET_BROADCAST));
  FDP_TRY(check(bucket, sources, flats, flat_count));
  for (int32_t i = 0; i < flat_count; ++i) {
    devices[i] = flats[i].device;
    addresses[i] = flats[i].data;
  }
  FDP_TRY(fdp_context_party(context, bucket->transport, sources[0].device, home_stream, devices,
                            flat_streams, flat_count, &party));
  segments = malloc((size_t)bucket->count * sizeof *segments);
  if (!segments) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "%s: no host memory for %d segments", verb, bucket->count);
    goto done;
  }
  FDP_TRY(plan(bucket, sources, &party.home, &stage, segments, &segment_count));
  FDP_TRY(party.transport->ops->pack(party.transport, &party.home, segments, segment_count,
                                     party.others, addresses, flat_count));
  fdp_counters_add(FDP_VERB_BUCKET_BROADCAST, tensor_bytes(segments, segment_count) * flat_count,
                   (int64_t)segment_count * flat_count);
done:
  free(segments);
  status = fdp_stage_close(&stage, status, party.others, flat_count);
  fdp_recorder_end(record, status);
  return status;
}
