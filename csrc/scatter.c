#include "scatter.h"

#include "checks.h"
#include "counters.h"
#include "fault.h"
#include "plan.h"
#include "recorder.h"

static fdp_status check(const fdp_view *source, fdp_named_views targets, int32_t dim) {
  fdp_status status;
  FDP_TRY(fdp_check_count("scatter", targets.name, targets.count));
  FDP_TRY(fdp_check_dtypes("scatter", targets, "source", source));
  FDP_TRY(fdp_check_slices("scatter", targets, "source", source, dim));
  FDP_TRY(fdp_check_writable("scatter", targets));
  FDP_TRY(fdp_check_apart("scatter", targets, "source", source, false));
done:
  return status;
}

fdp_status fdp_scatter(fdp_context *context, const fdp_view *source, fdp_stream *source_stream,
                       const fdp_view *targets, fdp_stream *const *target_streams,
                       int32_t target_count, int32_t dim) {
  fdp_party party;
  fdp_device_id devices[FDP_MAX_REPLICAS];
  fdp_transfer transfers[FDP_MAX_REPLICAS];
  int32_t copy_counts[FDP_MAX_REPLICAS];
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  int64_t record = fdp_recorder_begin(FDP_VERB_SCATTER, 0, fdp_view_size_bytes(source),
                                      source->device, source_stream, target_count);
  fdp_status status;
  FDP_TRY(fdp_fault_check(FDP_FAULT_SCATTER));
  FDP_TRY(check(source, (fdp_named_views){"targets", targets, target_count, false}, dim));
  for (int32_t i = 0; i < target_count; ++i) devices[i] = targets[i].device;
  FDP_TRY(fdp_context_party(context, NULL, source->device, source_stream, devices,
                            target_streams, target_count, &party));
  FDP_TRY(fdp_plan_slices(&list, source, targets, target_count, dim, FDP_PLAN_SCATTER,
                          copy_counts));
  const fdp_strided_copy *copies = list.copies;
  for (int32_t i = 0; i < target_count; ++i) {
    transfers[i] = (fdp_transfer){party.home, party.others[i], copies, copy_counts[i]};
    copies += copy_counts[i];
  }
  FDP_TRY(party.transport->ops->copy(party.transport, transfers, target_count));
  fdp_counters_add(FDP_VERB_SCATTER, list.size_bytes, list.count);
done:
  fdp_copy_list_drop(&list);
  fdp_recorder_end(record, status);
  return status;
}
