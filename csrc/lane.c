#include "lane.h"

#include <pthread.h>
#include <stdlib.h>

#define MAX_LANES (FDP_MAX_REPLICAS + 1)

struct fdp_lanes {
  pthread_mutex_t mutex; /* guards all below */
  fdp_stream_ref streams[MAX_LANES];
  int32_t count;
};

fdp_status fdp_lanes_open(fdp_lanes **lanes) {
  fdp_lanes *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "transport: no host memory for its streams");
  pthread_mutex_init(&opened->mutex, NULL);
  *lanes = opened;
  return FDP_OK;
}

void fdp_lanes_close(fdp_lanes *lanes) {
  if (!lanes) return;
  for (int32_t i = 0; i < lanes->count; ++i) {
    fdp_device *device = lanes->streams[i].device;
    device->ops->stream_close(device, lanes->streams[i].stream);
  }
  pthread_mutex_destroy(&lanes->mutex);
  free(lanes);
}

fdp_status fdp_lane_of(fdp_lanes *lanes, const fdp_endpoint *base, fdp_endpoint *lane) {
  fdp_device *device = base->device;
  fdp_status status = FDP_OK;
  pthread_mutex_lock(&lanes->mutex);
  int32_t at = 0;
  while (at < lanes->count && lanes->streams[at].device != device) ++at;
  if (at == MAX_LANES) {
    status = fdp_fail(FDP_UNSUPPORTED, "transport: more than %d devices", MAX_LANES);
    goto done;
  }
  if (at == lanes->count) {
    fdp_stream *opened = NULL;
    FDP_TRY(device->ops->stream_open(device, &opened));
    lanes->streams[lanes->count++] = (fdp_stream_ref){device, opened};
  }
  *lane = *base;
  lane->stream = lanes->streams[at].stream;
done:
  pthread_mutex_unlock(&lanes->mutex);
  return status;
}

fdp_status fdp_lane_enter(fdp_lanes *lanes, const fdp_endpoint *base, fdp_endpoint *lane) {
  fdp_status status = FDP_OK;
  *lane = *base;
  if (base->stream) return FDP_OK;
  FDP_TRY(fdp_lane_of(lanes, base, lane));
  FDP_TRY(fdp_endpoint_after(base, lane));
done:
  return status;
}

fdp_status fdp_lane_leave(const fdp_endpoint *lane, const fdp_endpoint *base, fdp_status status) {
  if (lane->stream == base->stream) return status;
  if (status == FDP_OK) status = fdp_endpoint_after(lane, base);
  return status == FDP_OK ? status : fdp_endpoint_settle(lane, base, status);
}
