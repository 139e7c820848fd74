#include "transport_local.h"

#include <stdlib.h>

static void local_close(fdp_transport *transport) { free(transport); }

static fdp_status local_joins(const fdp_transport *transport, const fdp_endpoint *home,
                              const fdp_endpoint *others, int32_t other_count) {
  (void)transport;
  fdp_device_id home_id = home->device->id;
  for (int32_t i = 0; i < other_count; ++i) {
    fdp_device_id id = others[i].device->id;
    bool is_host = home_id.kind == FDP_DEVICE_HOST && id.kind == FDP_DEVICE_HOST;
    if (is_host || home->device == others[i].device) continue;
    char home_text[32], other_text[32];
    return fdp_fail(FDP_UNSUPPORTED, "%s and %s are different memories",
                    fdp_device_text(home_id, home_text, sizeof home_text),
                    fdp_device_text(id, other_text, sizeof other_text));
  }
  return FDP_OK;
}

/* Note "three passes". All waits of targets for sources are enqueued before any work, and all waits
 * of sources for targets after all work: one at a time, the second target would wait for the first,
 * through the source that they share. */

static fdp_status local_copy(const fdp_transport *transport, const fdp_transfer *transfers,
                             int32_t transfer_count) {
  (void)transport;
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_after(&transfers[i].source, &transfers[i].target));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    const fdp_transfer *transfer = &transfers[i];
    fdp_device *device = transfer->target.device;
    if (transfer->copy_count == 0) continue;
    FDP_TRY(device->ops->copy_strided(device, transfer->target.stream, transfer->copies,
                                      transfer->copy_count));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_after(&transfers[i].target, &transfers[i].source));
  }
done:
  return status;
}

static fdp_status local_pack(const fdp_transport *transport, const fdp_endpoint *home,
                             const fdp_segment *segments, int32_t segment_count,
                             const fdp_endpoint *targets, void *const *flats,
                             int32_t target_count) {
  (void)transport;
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < target_count; ++i) FDP_TRY(fdp_endpoint_after(home, &targets[i]));
  for (int32_t i = 0; i < target_count && segment_count > 0; ++i) {
    fdp_device *device = targets[i].device;
    FDP_TRY(device->ops->pack(device, targets[i].stream, flats[i], segments, segment_count));
  }
  for (int32_t i = 0; i < target_count; ++i) FDP_TRY(fdp_endpoint_after(&targets[i], home));
done:
  return status;
}

static fdp_status local_sum(const fdp_transport *transport, const fdp_endpoint *home,
                            const fdp_endpoint *ranks, int32_t rank_count, const fdp_sum *sums,
                            int32_t sum_count, void *span, int64_t span_bytes) {
  (void)transport;
  (void)span;
  (void)span_bytes;
  fdp_status status = FDP_OK;
  for (int32_t r = 0; r < rank_count; ++r) FDP_TRY(fdp_endpoint_after(&ranks[r], home));
  if (sum_count > 0) {
    FDP_TRY(home->device->ops->sum(home->device, home->stream, sums, sum_count));
  }
  for (int32_t r = 0; r < rank_count; ++r) FDP_TRY(fdp_endpoint_after(home, &ranks[r]));
done:
  return status;
}

static const fdp_transport_ops local_ops = {
    .name = "local",
    .close = local_close,
    .joins = local_joins,
    .copy = local_copy,
    .pack = local_pack,
    .sum = local_sum,
};

fdp_status fdp_transport_local_open(fdp_transport **transport) {
  fdp_transport *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "local: no host memory for the transport");
  opened->ops = &local_ops;
  *transport = opened;
  return FDP_OK;
}
