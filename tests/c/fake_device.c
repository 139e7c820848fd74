/* The CUDA device over a runtime that a test can make fail: every message of device_cuda*.c, what
 * it leaves behind (current device, capture mode, error state), its deadlines. Needs no CUDA:
 *
 *   cd tests/c && gcc -std=c11 -D_GNU_SOURCE -DFDP_WITH_CUDA -Ifake_cuda fake_device.c \
 *       fake_cuda/fake_runtime.c ../../csrc/device_cuda*.c ../../csrc/status.c \
 *       ../../csrc/env.c -o fake_device && ./fake_device
 *
 * Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/device_cuda.h"
#include "../../csrc/device_cuda_guard.h"
#include "alone.h"
#include "fake_cuda/fake_runtime.h"

#define CHECK_FAILS(call, status, message) \
  CHECK((call) == (status) && strcmp(fdp_last_message(), (message)) == 0)

static void test_open(void) {
  fdp_device *device = NULL;
  fake_fail("cudaGetDeviceCount", cudaErrorInsufficientDriver);
  fake.driver_version = 11040;
  CHECK_FAILS(fdp_device_cuda_open(0, &device), FDP_UNSUPPORTED,
              "cuda:0: the NVIDIA driver is too old: this build needs one for CUDA 12.0 or newer, "
              "found one for CUDA 11.4");
  fake.driver_version = 0;
  CHECK_FAILS(fdp_device_cuda_open(0, &device), FDP_UNSUPPORTED,
              "cuda:0: no NVIDIA driver found; this build needs one for CUDA 12.0 or newer");
  fake_fail("cudaGetDeviceCount", cudaErrorNoDevice);
  CHECK_FAILS(fdp_device_cuda_open(0, &device), FDP_UNSUPPORTED,
              "cuda:0: this machine shows no NVIDIA GPU");
  fake_fail("cudaGetDeviceCount", cudaErrorIllegalAddress);
  CHECK_FAILS(fdp_device_cuda_open(0, &device), FDP_DEVICE_ERROR,
              "cuda:0: counting the GPUs: an illegal address (cudaErrorIllegalAddress)");
  CHECK(fake.last_error == cudaSuccess);
  fake_reset();
  CHECK_FAILS(fdp_device_cuda_open(2, &device), FDP_INVALID_ARGUMENT,
              "cuda:2: there is no such GPU: ordinals are 0 to 1");
  CHECK_FAILS(fdp_device_cuda_open(-1, &device), FDP_INVALID_ARGUMENT,
              "cuda:-1: there is no such GPU: ordinals are 0 to 1");
  fake.capability = 61;
  CHECK_FAILS(fdp_device_cuda_open(1, &device), FDP_UNSUPPORTED,
              "cuda:1: compute capability 6.1 is too old: 7.5 or newer is needed");
  fake_fail("cudaDeviceGetAttribute", cudaErrorIllegalAddress);
  CHECK_FAILS(fdp_device_cuda_open(1, &device), FDP_DEVICE_ERROR,
              "cuda:1: its compute capability: an illegal address (cudaErrorIllegalAddress, 700)");
  fake_reset();
  setenv("FASTDP_TIMEOUT_MS", "soon", 1);
  CHECK(fdp_device_cuda_open(1, &device) == FDP_INVALID_ARGUMENT && device == NULL);
}

static void test_memory(fdp_device *device) {
  void *address = NULL;
  fake_fail("cudaMalloc", cudaErrorMemoryAllocation);
  CHECK_FAILS(device->ops->memory_take(device, 5000, &address), FDP_OUT_OF_MEMORY,
              "cuda:1: no memory for 5000 bytes: 1000 of 4000 bytes are free");
  fake_fail("cudaMalloc", cudaErrorIllegalAddress);
  CHECK_FAILS(device->ops->memory_take(device, 5000, &address), FDP_DEVICE_ERROR,
              "cuda:1: memory_take: an illegal address (cudaErrorIllegalAddress, 700)");
  CHECK(address == NULL && fake.last_error == cudaSuccess);
  fake_reset();
  CHECK(device->ops->memory_take(device, 0, &address) == FDP_OK && address != NULL);
  device->ops->memory_drop(device, address);
  device->ops->memory_drop(device, NULL);
}

/* Each function that makes one call of the runtime: the name in its message, and what fails. */
static void test_each_call(fdp_device *device) {
  static const char *const calls[][2] = {
      {"stream_open", "cudaStreamCreateWithFlags"}, {"event_open", "cudaEventCreateWithFlags"},
      {"event_record", "cudaEventRecord"},          {"stream_wait", "cudaStreamWaitEvent"},
      {"event_query", "cudaEventQuery"},            {"event_synchronize", "cudaEventQuery"},
      {"copy", "cudaMemcpyAsync"},                  {"copy_strided", "copy_strided"},
      {"pack", "pack"},                             {"unpack", "unpack"},
      {"sum", "sum"}};
  const fdp_device_ops *ops = device->ops;
  for (int fails = 0; fails < 2; fails++) {
    for (int k = 0; k < 11; k++) {
      fdp_stream *stream = NULL;
      fdp_event *event = NULL;
      bool has_passed = false;
      char byte = 1, copy = 0, message[100];
      if (fails) fake_fail(calls[k][1], cudaErrorIllegalAddress);
      fdp_status status =
          k == 0   ? ops->stream_open(device, &stream)
          : k == 1 ? ops->event_open(device, &event)
          : k == 2 ? ops->event_record(device, event, stream)
          : k == 3 ? ops->stream_wait(device, stream, event)
          : k == 4 ? ops->event_query(device, event, &has_passed)
          : k == 5 ? ops->event_synchronize(device, event, 10, NULL)
          : k == 6 ? ops->copy(device, stream, &copy, &byte, 1)
          : k == 7 ? ops->copy_strided(device, stream, NULL, 0)
          : k == 8 ? ops->pack(device, stream, NULL, NULL, 0)
          : k == 9 ? ops->unpack(device, stream, NULL, NULL, 0)
                   : ops->sum(device, stream, NULL, 0);
      snprintf(message, sizeof message,
               "cuda:1: %s: an illegal address (cudaErrorIllegalAddress, 700)", calls[k][0]);
      CHECK(status == (fails ? FDP_DEVICE_ERROR : FDP_OK));
      CHECK(!fails || strcmp(fdp_last_message(), message) == 0);
      CHECK(!fails || (stream == NULL && event == NULL && !has_passed));
      CHECK(fails || k != 0 || stream != NULL);
      CHECK(fails || k != 1 || event != NULL);
      CHECK(fails || k != 4 || has_passed);
      CHECK(fails || k != 6 || copy == 1);
      CHECK(fake.last_error == cudaSuccess && fake.current == 0);
      CHECK(fake.mode == cudaStreamCaptureModeGlobal && !fake.had_wrong_device);
    }
    fake_reset();
  }
  fake_fail("sum", cudaErrorNoKernelImageForDevice);
  CHECK_FAILS(ops->sum(device, NULL, NULL, 0), FDP_UNSUPPORTED,
              "cuda:1: sum: this build has no kernels for compute capability 9.0 (see "
              "FASTDP_CUDA_ARCHS)");
  fake_fail("sum", cudaErrorMemoryAllocation);
  CHECK_FAILS(ops->sum(device, NULL, NULL, 0), FDP_OUT_OF_MEMORY, "cuda:1: sum: another error");
  fake_reset();
}

/* What closes is called on the way out of a failure, whose message it leaves: on a device that went
 * wrong, closing fails too. */
static void test_closing(fdp_device *device) {
  static const char *const calls[] = {"cudaStreamDestroy", "cudaEventDestroy", "cudaFree",
                                      "cudaFreeHost", "cudaSetDevice", "cudaStreamQuery"};
  const fdp_device_ops *ops = device->ops;
  for (int k = 0; k < 6; k++) {
    fdp_stream *stream = NULL;
    fdp_event *event = NULL;
    void *address = NULL, *pinned = NULL;
    CHECK(ops->stream_open(device, &stream) == FDP_OK);
    CHECK(ops->event_open(device, &event) == FDP_OK);
    CHECK(ops->memory_take(device, 8, &address) == FDP_OK);
    CHECK(ops->pinned_take(device, 8, &pinned) == FDP_OK);
    fdp_fail(FDP_TIMED_OUT, "what matters");
    fake_fail(calls[k], cudaErrorIllegalAddress);
    ops->stream_close(device, stream);
    ops->event_close(device, event);
    ops->memory_drop(device, address);
    ops->pinned_drop(device, pinned);
    if (k == 4) free(address); /* no device, no call */
    if (k == 4) free(pinned);
    CHECK(strcmp(fdp_last_message(), "what matters") == 0);
    CHECK(fake.last_error == cudaSuccess && fake.current == 0);
    CHECK(fake.mode == cudaStreamCaptureModeGlobal);
    fake_reset();
  }
}

static void test_guard(fdp_device *device) {
  fdp_cuda_guard guard;
  fake_fail("cudaSetDevice", cudaErrorIllegalAddress);
  CHECK_FAILS(fdp_cuda_guard_enter(&guard, device), FDP_DEVICE_ERROR,
              "cuda:1: making the device current: an illegal address (cudaErrorIllegalAddress, "
              "700)");
  fake_fail("cudaThreadExchangeStreamCaptureMode", cudaErrorIllegalAddress);
  CHECK_FAILS(fdp_cuda_guard_enter(&guard, device), FDP_DEVICE_ERROR,
              "cuda:1: setting the stream capture mode: an illegal address "
              "(cudaErrorIllegalAddress, 700)");
  CHECK(fake.current == 0);
  fake_reset();
  fake.current = 1;
  CHECK(fdp_cuda_guard_enter(&guard, device) == FDP_OK);
  fdp_cuda_guard_leave(&guard);
  CHECK(fake.set_calls == 0); /* it was current */
  fake_reset();
}

static int answer_active;

static int context_state(int ordinal, unsigned int *flags, int *active) {
  *flags = 0;
  *active = answer_active;
  return ordinal == 0 ? 0 : 1;
}

/* A device that was never used is not made current again: it would come to life. */
static void test_alive(fdp_device *device) {
  fdp_cuda_device *opened = (fdp_cuda_device *)device;
  fdp_cuda_guard guard;
  opened->get_context_state = context_state;
  for (answer_active = 0; answer_active < 2; answer_active++) {
    CHECK(fdp_cuda_guard_enter(&guard, device) == FDP_OK);
    fdp_cuda_guard_leave(&guard);
    CHECK(fake.current == (answer_active ? 0 : 1));
    fake_reset();
  }
  opened->get_context_state = NULL;
}

static void test_waits(fdp_device *device) {
  const fdp_device_ops *ops = device->ops;
  bool has_passed = true;
  int stop = 0;
  fake.busy_queries = 1;
  CHECK(ops->event_query(device, NULL, &has_passed) == FDP_OK && !has_passed);
  fake.busy_queries = 200;
  CHECK(ops->event_synchronize(device, NULL, 60000, &stop) == FDP_OK);
  CHECK(fake.busy_queries == 0 && fake.last_error == cudaSuccess);
  fake.busy_queries = 1 << 30;
  fake.queries = 0;
  CHECK_FAILS(ops->event_synchronize(device, NULL, 100, NULL), FDP_TIMED_OUT,
              "cuda:1: event_synchronize: not done within 100 ms");
  CHECK(fake.queries < 1500); /* it slept */
  stop = 1;
  CHECK_FAILS(ops->event_synchronize(device, NULL, 60000, &stop), FDP_ABORTED,
              "cuda:1: event_synchronize: the wait was told to stop");
  CHECK(fake.current == 0 && fake.mode == cudaStreamCaptureModeGlobal);
  ops->stream_close(device, (fdp_stream *)(void *)&fake); /* FASTDP_TIMEOUT_MS is 50 */
  CHECK(fake.busy_queries > 0 && fake.last_error == cudaSuccess);
  fake_reset();
}

static void test_peers(fdp_device *device) {
  bool can = false;
  CHECK(fdp_device_cuda_can_reach(device, 1, &can) == FDP_OK && can);
  CHECK(fdp_device_cuda_enable_peer(device, 1) == FDP_OK && fake.peer_calls == 0);
  fake.can_access = 0;
  CHECK_FAILS(fdp_device_cuda_enable_peer(device, 0), FDP_UNSUPPORTED,
              "cuda:1: cannot reach the memory of cuda:0");
  fake_fail("cudaDeviceCanAccessPeer", cudaErrorIllegalAddress);
  CHECK(fdp_device_cuda_can_reach(device, 0, &can) == FDP_DEVICE_ERROR && !can);
  fake_reset();
  fake_fail("cudaDeviceEnablePeerAccess", cudaErrorIllegalAddress);
  CHECK_FAILS(fdp_device_cuda_enable_peer(device, 0), FDP_DEVICE_ERROR,
              "cuda:1: enabling peer access: an illegal address (cudaErrorIllegalAddress, 700)");
  static const cudaError_t refusals[] = {cudaErrorTooManyPeers, cudaErrorPeerAccessUnsupported};
  for (int i = 0; i < 2; i++) {
    fake_fail("cudaDeviceEnablePeerAccess", refusals[i]);
    CHECK_FAILS(fdp_device_cuda_enable_peer(device, 0), FDP_UNSUPPORTED,
                "cuda:1: cannot reach the memory of cuda:0: another error");
    CHECK(fake.last_error == cudaSuccess && fake.current == 0);
  }
  fake.peer_calls = 1;
  fake_fail("cudaDeviceEnablePeerAccess", cudaErrorPeerAccessAlreadyEnabled);
  CHECK(fdp_device_cuda_enable_peer(device, 0) == FDP_OK && fake.peer_calls == 2);
  CHECK(fake.last_error == cudaSuccess && fake.current == 0 && !fake.had_wrong_device);
  CHECK(fdp_device_cuda_enable_peer(device, 0) == FDP_OK && fake.peer_calls == 2); /* once */
  fake_reset();
}

int main(void) {
  fdp_device *device = NULL;
  fake_reset();
  test_open();
  setenv("FASTDP_TIMEOUT_MS", "50", 1);
  CHECK(fdp_device_cuda_open(1, &device) == FDP_OK);
  if (device) {
    test_memory(device);
    test_each_call(device);
    test_closing(device);
    test_guard(device);
    test_alive(device);
    test_waits(device);
    test_peers(device);
    device->ops->close(device);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
