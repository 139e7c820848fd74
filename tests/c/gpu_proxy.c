#include "gpu_proxy.h"

#include <stdlib.h>

#include "../../csrc/device_cuda.h"

typedef struct gpu_proxy {
  fdp_device base;
  fdp_device *real;
} gpu_proxy;

static fdp_device *real_of(fdp_device *device) { return ((gpu_proxy *)device)->real; }

static void device_close(fdp_device *device) {
  real_of(device)->ops->close(real_of(device));
  free(device);
}

static fdp_status peer_reach(fdp_device *device, fdp_device *peer) {
  return real_of(device)->ops->peer_reach(real_of(device), real_of(peer));
}

static fdp_status memory_take(fdp_device *device, size_t size_bytes, void **address) {
  return real_of(device)->ops->memory_take(real_of(device), size_bytes, address);
}

static void memory_drop(fdp_device *device, void *address) {
  real_of(device)->ops->memory_drop(real_of(device), address);
}

static fdp_status pinned_take(fdp_device *device, size_t size_bytes, void **address) {
  return real_of(device)->ops->pinned_take(real_of(device), size_bytes, address);
}

static void pinned_drop(fdp_device *device, void *address) {
  real_of(device)->ops->pinned_drop(real_of(device), address);
}

static fdp_status make_current(fdp_device *device) {
  return real_of(device)->ops->make_current(real_of(device));
}

static fdp_status stream_open(fdp_device *device, fdp_stream **stream) {
  return real_of(device)->ops->stream_open(real_of(device), stream);
}

static void stream_close(fdp_device *device, fdp_stream *stream) {
  real_of(device)->ops->stream_close(real_of(device), stream);
}

static fdp_status event_open(fdp_device *device, fdp_event **event) {
  return real_of(device)->ops->event_open(real_of(device), event);
}

static void event_close(fdp_device *device, fdp_event *event) {
  real_of(device)->ops->event_close(real_of(device), event);
}

static fdp_status event_record(fdp_device *device, fdp_event *event, fdp_stream *stream) {
  return real_of(device)->ops->event_record(real_of(device), event, stream);
}

static fdp_status stream_wait(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  return real_of(device)->ops->stream_wait(real_of(device), stream, event);
}

static fdp_status event_query(fdp_device *device, fdp_event *event, bool *passed) {
  return real_of(device)->ops->event_query(real_of(device), event, passed);
}

static fdp_status event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                    const volatile int *abort_flag) {
  return real_of(device)->ops->event_synchronize(real_of(device), event, timeout_ms, abort_flag);
}

static fdp_status copy(fdp_device *device, fdp_stream *stream, void *target, const void *source,
                       int64_t size_bytes) {
  return real_of(device)->ops->copy(real_of(device), stream, target, source, size_bytes);
}

static fdp_status copy_strided(fdp_device *device, fdp_stream *stream,
                               const fdp_strided_copy *copies, int32_t count) {
  return real_of(device)->ops->copy_strided(real_of(device), stream, copies, count);
}

static fdp_status pack(fdp_device *device, fdp_stream *stream, void *flat,
                       const fdp_segment *segments, int32_t count) {
  return real_of(device)->ops->pack(real_of(device), stream, flat, segments, count);
}

static fdp_status unpack(fdp_device *device, fdp_stream *stream, const void *flat,
                         const fdp_segment *segments, int32_t count) {
  return real_of(device)->ops->unpack(real_of(device), stream, flat, segments, count);
}

static fdp_status sum(fdp_device *device, fdp_stream *stream, const fdp_sum *sums, int32_t count) {
  return real_of(device)->ops->sum(real_of(device), stream, sums, count);
}

static const fdp_device_ops proxy_ops = {
    .name = "proxy",
    .close = device_close,
    .peer_reach = peer_reach,
    .memory_take = memory_take,
    .memory_drop = memory_drop,
    .pinned_take = pinned_take,
    .pinned_drop = pinned_drop,
    .make_current = make_current,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .event_open = event_open,
    .event_close = event_close,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .copy = copy,
    .copy_strided = copy_strided,
    .pack = pack,
    .unpack = unpack,
    .sum = sum,
};

fdp_status gpu_proxy_open(int32_t number, int32_t ordinal, fdp_device **device) {
  gpu_proxy *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "proxy: no host memory");
  fdp_status status = fdp_device_cuda_open(ordinal, &opened->real);
  if (status != FDP_OK) {
    free(opened);
    return status;
  }
  opened->base.ops = &proxy_ops;
  opened->base.id = (fdp_device_id){FDP_DEVICE_CUDA, number};
  *device = &opened->base;
  return FDP_OK;
}
