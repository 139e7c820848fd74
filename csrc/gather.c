#include "gather.h"

#include "checks.h"
#include "counters.h"
#include "fault.h"
#include "plan.h"
#include "recorder.h"

static fdp_status check(fdp_named_views sources, const fdp_view *target, int32_t dim) {
  fdp_named_views targets = {"target", target, 1, true};
  fdp_status status;
  FDP_TRY(fdp_check_count("gather", sources.name, sources.count));
  FDP_TRY(fdp_check_dtypes("gather", sources, "target", target));
  FDP_TRY(fdp_check_slices("gather", sources, "target", target, dim));
  FDP_TRY(fdp_check_writable("gather", targets));
  FDP_TRY(fdp_check_apart("gather", sources, "target", target, false));
done:
  return status;
}

fdp_status fdp_gather(fdp_context *context, const fdp_view *sources,
                      fdp_stream *const *source_streams, int32_t source_count,
                      const fdp_view *target, fdp_stream *target_stream, int32_t dim) {
  fdp_party party;
  fdp_device_id devices[FDP_MAX_REPLICAS];
  fdp_transfer transfers[FDP_MAX_REPLICAS];
  int32_t copy_counts[FDP_MAX_REPLICAS];
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  int64_t record = fdp_recorder_begin(FDP_VERB_GATHER, 0, fdp_view_size_bytes(target),
                                      target->device, target_stream, source_count);
  fdp_status status;
  FDP_TRY(fdp_fault_check(FDP_FAULT_GATHER));
  FDP_TRY(check((fdp_named_views){"sources", sources, source_count, false}, target, dim));
  for (int32_t i = 0; i < source_count; ++i) devices[i] = sources[i].device;
  FDP_TRY(fdp_context_party(context, NULL, target->device, target_stream, devices,
                            source_streams, source_count, &party));
  FDP_TRY(fdp_plan_slices(&list, target, sources, source_count, dim, FDP_PLAN_GATHER,
                          copy_counts));
  const fdp_strided_copy *copies = list.copies;
  for (int32_t i = 0; i < source_count; ++i) {
    transfers[i] = (fdp_transfer){party.others[i], party.home, copies, copy_counts[i]};
    copies += copy_counts[i];
  }
  FDP_TRY(party.transport->ops->copy(party.transport, transfers, source_count));
  fdp_counters_add(FDP_VERB_GATHER, list.size_bytes, list.count);
done:
  fdp_copy_list_drop(&list);
  fdp_recorder_end(record, status);
  return status;
}
