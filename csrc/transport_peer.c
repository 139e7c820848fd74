#include "transport_peer.h"

#include <stdlib.h>

#include "lane.h"
#include "peer_leads.h"
#include "peer_pack.h"
#include "peer_sum.h"

typedef struct peer_transport {
  fdp_transport base;
  fdp_peer_book *book;
  fdp_lanes *lanes;
} peer_transport;

static void peer_close(fdp_transport *transport) {
  peer_transport *opened = (peer_transport *)transport;
  fdp_lanes_close(opened->lanes);
  fdp_peer_book_close(opened->book);
  free(opened);
}

static fdp_status check_gpu(const fdp_endpoint *endpoint) {
  char text[32];
  if (endpoint->device->id.kind == FDP_DEVICE_CUDA) return FDP_OK;
  return fdp_fail(FDP_UNSUPPORTED, "%s is no GPU",
                  fdp_device_text(endpoint->device->id, text, sizeof text));
}

static fdp_status peer_joins(const fdp_transport *transport, const fdp_endpoint *home,
                             const fdp_endpoint *others, int32_t other_count) {
  const peer_transport *opened = (const peer_transport *)transport;
  fdp_peer_leads leads = fdp_peer_leads_find(home, others, other_count);
  fdp_status status;
  FDP_TRY(check_gpu(home));
  for (int32_t i = 0; i < leads.count; ++i) FDP_TRY(check_gpu(&others[leads.indices[i]]));
  for (int32_t i = -1; i < leads.count; ++i) {
    fdp_device *device = i < 0 ? home->device : others[leads.indices[i]].device;
    for (int32_t k = i + 1; k < leads.count; ++k) {
      FDP_TRY(fdp_peer_book_allows(opened->book, device, others[leads.indices[k]].device));
    }
  }
done:
  return status;
}

/* By a copy engine. */
static fdp_status pull_largely(fdp_lanes *lanes, const fdp_transfer *transfer) {
  const fdp_endpoint *target = &transfer->target;
  fdp_endpoint lane = *target;
  bool is_within = transfer->source.device == target->device;
  fdp_status status = is_within ? FDP_OK : fdp_lane_enter(lanes, target, &lane);
  if (status != FDP_OK) return status;
  status = fdp_endpoint_copy(&lane, transfer->copies, transfer->copy_count);
  return fdp_lane_leave(&lane, target, status);
}

static fdp_status pull(fdp_lanes *lanes, const fdp_transfer *transfer) {
  const fdp_endpoint *target = &transfer->target;
  int64_t size_bytes = 0;
  for (int32_t i = 0; i < transfer->copy_count; ++i) {
    size_bytes += transfer->copies[i].ndim == 0 ? transfer->copies[i].item_bytes : 0;
  }
  if (size_bytes > FDP_PEER_DIRECT_BYTES) return pull_largely(lanes, transfer);
  if (transfer->copy_count == 0) return FDP_OK;
  return target->device->ops->copy_strided(target->device, target->stream, transfer->copies,
                                           transfer->copy_count);
}

/* Three passes, as in transport_local.c: each target's stream reads its source's memory. */
static fdp_status peer_copy(const fdp_transport *transport, const fdp_transfer *transfers,
                            int32_t transfer_count) {
  fdp_lanes *lanes = ((const peer_transport *)transport)->lanes;
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_after(&transfers[i].source, &transfers[i].target));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(pull(lanes, &transfers[i]));
  }
  for (int32_t i = 0; i < transfer_count; ++i) {
    FDP_TRY(fdp_endpoint_after(&transfers[i].target, &transfers[i].source));
  }
done:
  return status;
}

static fdp_status peer_pack(const fdp_transport *transport, const fdp_endpoint *home,
                            const fdp_segment *segments, int32_t segment_count,
                            const fdp_endpoint *targets, void *const *flats,
                            int32_t target_count) {
  return fdp_peer_pack(((const peer_transport *)transport)->lanes, home, segments, segment_count,
                       targets, flats, target_count);
}

static fdp_status peer_sum(const fdp_transport *transport, const fdp_endpoint *home,
                           const fdp_endpoint *ranks, int32_t rank_count, const fdp_sum *sums,
                           int32_t sum_count, void *span, int64_t span_bytes) {
  return fdp_peer_sum(((const peer_transport *)transport)->lanes, home, ranks, rank_count, sums,
                      sum_count, span, span_bytes);
}

static const fdp_transport_ops peer_ops = {
    .name = "peer",
    .close = peer_close,
    .joins = peer_joins,
    .copy = peer_copy,
    .pack = peer_pack,
    .sum = peer_sum,
};

fdp_peer_book *fdp_transport_peer_book(const fdp_transport *transport) {
  return ((const peer_transport *)transport)->book;
}

fdp_status fdp_transport_peer_open(int64_t timeout_ms, fdp_transport **transport) {
  peer_transport *opened = calloc(1, sizeof *opened);
  fdp_status status;
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "peer: no host memory for the transport");
  opened->base.ops = &peer_ops;
  FDP_TRY(fdp_lanes_open(&opened->lanes));
  FDP_TRY(fdp_peer_book_open(timeout_ms, &opened->book));
  *transport = &opened->base;
  opened = NULL;
done:
  if (opened) peer_close(&opened->base);
  return status;
}
