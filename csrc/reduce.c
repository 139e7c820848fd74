#include "reduce.h"

#include "checks.h"
#include "counters.h"
#include "fault.h"
#include "recorder.h"
#include "stage.h"

static fdp_status check(fdp_named_views sources, const fdp_view *target) {
  fdp_status status;
  FDP_TRY(fdp_check_count("reduce", sources.name, sources.count));
  if (!fdp_dtype_can_sum(target->dtype)) {
    char text[48];
    return fdp_fail(FDP_INVALID_TYPE, "reduce: target is %s, must be a dtype that can be summed",
                    fdp_dtype_name(target->dtype, text, sizeof text));
  }
  FDP_TRY(fdp_check_dtypes("reduce", sources, "target", target));
  FDP_TRY(fdp_check_shapes("reduce", sources, "target", target));
  FDP_TRY(fdp_check_writable("reduce", (fdp_named_views){"target", target, 1, true}));
  FDP_TRY(fdp_check_apart("reduce", sources, "target", target, true));
done:
  return status;
}

/* The layout in which the sum is made: the target's if that is without gaps, else row-major. */
static fdp_view sum_layout(const fdp_view *target) {
  fdp_view layout = *target;
  if (fdp_view_is_dense(target)) return layout;
  int64_t stride = 1;
  for (int32_t d = layout.ndim - 1; d >= 0; --d) {
    layout.strides[d] = stride;
    stride *= layout.shape[d];
  }
  return layout;
}

/* The address of `source` in the sum's layout: its own, or that of a copy. */
static fdp_status bring(const fdp_view *source, const fdp_view *layout,
                        const fdp_endpoint *endpoint, fdp_stage *stage, const void **address) {
  *address = source->data;
  if (fdp_view_same_layout(source, layout)) return FDP_OK;
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  int64_t used_bytes = 0;
  void *staged = NULL;
  fdp_status status;
  FDP_TRY(fdp_stage_open(stage, endpoint, fdp_stage_room_bytes(fdp_view_size_bytes(layout))));
  FDP_TRY(fdp_stage_plan(stage, &list, source, layout, &used_bytes, &staged));
  FDP_TRY(fdp_stage_run(stage, &list));
  *address = staged;
done:
  fdp_copy_list_drop(&list);
  return status;
}

/* The sum was made aside: copies it to where it belongs. */
static fdp_status put_away(const fdp_view *target, const fdp_view *layout, void *sum,
                           const fdp_endpoint *home) {
  fdp_copy_list list;
  fdp_copy_list_init(&list);
  fdp_view made = *layout;
  made.data = sum;
  fdp_status status;
  FDP_TRY(fdp_plan_copy(&list, target, &made));
  FDP_TRY(home->device->ops->copy_strided(home->device, home->stream, list.copies, list.count));
done:
  fdp_copy_list_drop(&list);
  return status;
}

static fdp_status run(const fdp_party *party, const fdp_view *sources, const fdp_view *target) {
  const void *addresses[FDP_MAX_REPLICAS];
  fdp_stage stages[FDP_MAX_REPLICAS] = {0};
  fdp_stage made_aside = {0};
  fdp_view layout = sum_layout(target);
  int64_t size_bytes = fdp_view_size_bytes(target);
  int32_t source_count = party->other_count;
  fdp_status status = FDP_OK;
  fdp_sum sum = {.target = target->data, .sources = addresses, .source_count = source_count,
                 .count_elems = fdp_view_count_elems(target), .dtype = target->dtype};
  if (size_bytes > 0 && !fdp_view_same_layout(target, &layout)) {
    FDP_TRY(fdp_stage_open(&made_aside, &party->home, size_bytes));
    sum.target = made_aside.buffer->data;
  }
  for (int32_t i = 0; i < source_count && size_bytes > 0; ++i) {
    FDP_TRY(bring(&sources[i], &layout, &party->others[i], &stages[i], &addresses[i]));
  }
  FDP_TRY(party->transport->ops->sum(party->transport, &party->home, party->others, source_count,
                                     &sum, size_bytes > 0 ? 1 : 0, sum.target, size_bytes));
  if (made_aside.buffer) FDP_TRY(put_away(target, &layout, sum.target, &party->home));
done:
  for (int32_t i = 0; i < source_count; ++i) {
    status = fdp_stage_close(&stages[i], status, &party->home, 1);
  }
  return fdp_stage_close(&made_aside, status, NULL, 0);
}

fdp_status fdp_reduce(fdp_context *context, const fdp_view *sources,
                      fdp_stream *const *source_streams, int32_t source_count,
                      const fdp_view *target, fdp_stream *target_stream) {
  fdp_party party;
  fdp_device_id devices[FDP_MAX_REPLICAS];
  int64_t record = fdp_recorder_begin(FDP_VERB_REDUCE, 0, fdp_view_size_bytes(target),
                                      target->device, target_stream, source_count);
  fdp_status status;
  FDP_TRY(fdp_fault_check(FDP_FAULT_REDUCE));
  FDP_TRY(check((fdp_named_views){"sources", sources, source_count, false}, target));
  for (int32_t i = 0; i < source_count; ++i) devices[i] = sources[i].device;
  FDP_TRY(fdp_context_party(context, NULL, target->device, target_stream, devices,
                            source_streams, source_count, &party));
  FDP_TRY(run(&party, sources, target));
  int64_t size_bytes = fdp_view_size_bytes(target);
  fdp_counters_add(FDP_VERB_REDUCE, size_bytes, size_bytes > 0 ? 1 : 0);
done:
  fdp_recorder_end(record, status);
  return status;
}
