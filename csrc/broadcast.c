#include "broadcast.h"

#include "checks.h"
#include "counters.h"
#include "fault.h"
#include "plan.h"
#include "recorder.h"

static fdp_status check(const fdp_view *source, fdp_named_views targets) {
  fdp_status status;
  FDP_TRY(fdp_check_count("broadcast", targets.name, targets.count));
  FDP_TRY(fdp_check_dtypes("broadcast", targets, "source", source));
  FDP_TRY(fdp_check_shapes("broadcast", targets, "source", source));
  FDP_TRY(fdp_check_writable("broadcast", targets));
  FDP_TRY(fdp_check_apart("broadcast", targets, "source", source, true));
done:
  return status;
}

fdp_status fdp_broadcast(fdp_context *context, const fdp_view *source, fdp_stream *source_stream,
                         const fdp_view *targets, fdp_stream *const *target_streams,
                         int32_t target_count) {
  fdp_party party;
  fdp_device_id devices[FDP_MAX_REPLICAS];
  fdp_transfer transfers[FDP_MAX_REPLICAS];
  int32_t copy_counts[FDP_MAX_REPLICAS];
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  int64_t record = fdp_recorder_begin(FDP_VERB_BROADCAST, 0, fdp_view_size_bytes(source),
                                      source->device, source_stream, target_count);
  fdp_status status;
  FDP_TRY(fdp_fault_check(FDP_FAULT_BROADCAST));
  FDP_TRY(check(source, (fdp_named_views){"targets", targets, target_count, false}));
  for (int32_t i = 0; i < target_count; ++i) devices[i] = targets[i].device;
  FDP_TRY(fdp_context_party(context, NULL, source->device, source_stream, devices,
                            target_streams, target_count, &party));
  for (int32_t i = 0; i < target_count; ++i) {
    int32_t before = list.count;
    /* A target that is the source gets an empty transfer, which still orders the streams. */
    if (!fdp_is_same_view(&targets[i], source)) FDP_TRY(fdp_plan_copy(&list, &targets[i], source));
    copy_counts[i] = list.count - before;
  }
  const fdp_strided_copy *copies = list.copies;
  for (int32_t i = 0; i < target_count; ++i) {
    transfers[i] = (fdp_transfer){party.home, party.others[i], copies, copy_counts[i]};
    copies += copy_counts[i];
  }
  FDP_TRY(party.transport->ops->copy(party.transport, transfers, target_count));
  fdp_counters_add(FDP_VERB_BROADCAST, list.size_bytes, list.count);
done:
  fdp_copy_list_drop(&list);
  fdp_recorder_end(record, status);
  return status;
}
