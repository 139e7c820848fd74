#include "device_cuda_stream.h"

#include <cuda_runtime_api.h>
#include <inttypes.h>
#include <time.h>

#include "clock.h"
#include "device_cuda_guard.h"

/* ---- host waits ---- */

static bool is_raised(const volatile int *flag) {
  return flag && __atomic_load_n(flag, __ATOMIC_RELAXED) != 0;
}

static cudaError_t query_event(void *event) { return cudaEventQuery(event); }
static cudaError_t query_stream(void *stream) { return cudaStreamQuery(stream); }

/* Asks at once and again, with sleeps that grow from nothing to half a millisecond: short waits
 * stay short, and long ones leave the processor alone. Writes no message; FDP_DEVICE_ERROR is
 * `*code`. The device is current. */
static fdp_status poll_for(cudaError_t (*query)(void *), void *handle, int64_t timeout_ms,
                           const volatile int *abort_flag, cudaError_t *code) {
  const int64_t longest_ns = 500000;
  int64_t start_ns = fdp_clock_ns();
  for (int64_t pause_ns = 0;; pause_ns += pause_ns / 4 + 100) {
    *code = query(handle);
    if (*code == cudaSuccess) return FDP_OK;
    (void)cudaGetLastError();
    if (*code != cudaErrorNotReady) return FDP_DEVICE_ERROR;
    if (is_raised(abort_flag)) return FDP_ABORTED;
    if ((fdp_clock_ns() - start_ns) / 1000000 >= timeout_ms) return FDP_TIMED_OUT;
    if (pause_ns > longest_ns) pause_ns = longest_ns;
    if (pause_ns > 2000) nanosleep(&(struct timespec){.tv_nsec = (long)pause_ns}, NULL);
  }
}

/* ---- streams and events ---- */

fdp_status fdp_cuda_stream_open(fdp_device *device, fdp_stream **stream) {
  fdp_cuda_guard guard;
  cudaStream_t opened = NULL;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = (int)cudaStreamCreateWithFlags(&opened, cudaStreamNonBlocking);
  if (code == cudaSuccess) *stream = (fdp_stream *)(void *)opened;
  return fdp_cuda_guard_finish(&guard, code, "stream_open");
}

void fdp_cuda_stream_close(fdp_device *device, fdp_stream *stream, int64_t timeout_ms) {
  fdp_cuda_guard guard;
  cudaError_t code;
  if (!stream || !fdp_cuda_guard_enter_quietly(&guard, device)) return;
  (void)poll_for(query_stream, stream, timeout_ms, NULL, &code);
  code = cudaStreamDestroy((cudaStream_t)(void *)stream);
  fdp_cuda_guard_finish_quietly(&guard, (int)code);
}

fdp_status fdp_cuda_stream_wait(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  cudaEvent_t awaited = (cudaEvent_t)(void *)event;
  int code = (int)cudaStreamWaitEvent((cudaStream_t)(void *)stream, awaited, 0);
  return fdp_cuda_guard_finish(&guard, code, "stream_wait");
}

fdp_status fdp_cuda_event_open(fdp_device *device, fdp_event **event) {
  fdp_cuda_guard guard;
  cudaEvent_t opened = NULL;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = (int)cudaEventCreateWithFlags(&opened, cudaEventDisableTiming);
  if (code == cudaSuccess) *event = (fdp_event *)(void *)opened;
  return fdp_cuda_guard_finish(&guard, code, "event_open");
}

void fdp_cuda_event_close(fdp_device *device, fdp_event *event) {
  fdp_cuda_guard guard;
  if (!event || !fdp_cuda_guard_enter_quietly(&guard, device)) return;
  int code = (int)cudaEventDestroy((cudaEvent_t)(void *)event);
  fdp_cuda_guard_finish_quietly(&guard, code);
}

fdp_status fdp_cuda_event_record(fdp_device *device, fdp_event *event, fdp_stream *stream) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = (int)cudaEventRecord((cudaEvent_t)(void *)event, (cudaStream_t)(void *)stream);
  return fdp_cuda_guard_finish(&guard, code, "event_record");
}

fdp_status fdp_cuda_event_query(fdp_device *device, fdp_event *event, bool *passed) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  cudaError_t code = query_event(event);
  *passed = code == cudaSuccess;
  if (code == cudaErrorNotReady) {
    (void)cudaGetLastError();
    code = cudaSuccess;
  }
  return fdp_cuda_guard_finish(&guard, (int)code, "event_query");
}

fdp_status fdp_cuda_event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                      const volatile int *abort_flag) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  static const char what[] = "event_synchronize";
  cudaError_t code;
  status = poll_for(query_event, event, timeout_ms, abort_flag, &code);
  if (status == FDP_DEVICE_ERROR) status = fdp_cuda_check(device, (int)code, what);
  if (status == FDP_ABORTED) {
    fdp_fail(status, "cuda:%d: %s: the wait was told to stop", device->id.ordinal, what);
  }
  if (status == FDP_TIMED_OUT) {
    fdp_fail(status, "cuda:%d: %s: not done within %" PRId64 " ms", device->id.ordinal, what,
             timeout_ms);
  }
  fdp_cuda_guard_leave(&guard);
  return status;
}
