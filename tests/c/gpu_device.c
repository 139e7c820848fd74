/* The CUDA device on a real GPU, through the table of device.h alone. With two GPUs it also tests
 * peers and that the current device is put back. `make gpu-test` builds and runs it. Under
 * compute-sanitizer, which may run everything at once, `gpu_device short` asks of no event whether
 * it has passed already.
 *
 * Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../../csrc/device_cuda.h"
#include "../../csrc/device_cuda_guard.h"
#include "alone.h"

enum { SLOW_BYTES = 256 << 20, SLOW_COPIES = 600 }; /* some 60 ms and more of work */

static bool is_short;

#define CHECK_OK(call) CHECK((call) == FDP_OK)

typedef struct rig {
  fdp_device *device;
  fdp_stream *stream, *other;
  fdp_event *event;
  char *slow; /* twice SLOW_BYTES */
} rig;

/* False if there is no such device. */
static bool rig_open(rig *r, int32_t ordinal) {
  fdp_status status = fdp_device_cuda_open(ordinal, &r->device);
  CHECK(status == FDP_OK);
  if (status != FDP_OK) return false;
  const fdp_device_ops *ops = r->device->ops;
  CHECK_OK(ops->stream_open(r->device, &r->stream));
  CHECK_OK(ops->stream_open(r->device, &r->other));
  CHECK_OK(ops->event_open(r->device, &r->event));
  CHECK_OK(ops->memory_take(r->device, 2 * (size_t)SLOW_BYTES, (void **)&r->slow));
  fdp_segment zeros = {NULL, 0, 2 * (int64_t)SLOW_BYTES};
  CHECK_OK(ops->pack(r->device, r->stream, r->slow, &zeros, 1));
  CHECK_OK(ops->event_record(r->device, r->event, r->stream));
  CHECK_OK(ops->stream_wait(r->device, r->other, r->event));
  CHECK_OK(ops->event_synchronize(r->device, r->event, 60000, NULL));
  return true;
}

static void rig_close(rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  ops->memory_drop(r->device, r->slow);
  ops->event_close(r->device, r->event);
  ops->stream_close(r->device, r->other);
  ops->stream_close(r->device, r->stream);
  ops->close(r->device);
}

/* Work that takes long, so that what waits for it can be seen to wait. */
static void be_slow(const rig *r, fdp_stream *stream) {
  for (int i = 0; i < (is_short ? 3 : SLOW_COPIES); i++) {
    CHECK_OK(r->device->ops->copy(r->device, stream, r->slow + SLOW_BYTES, r->slow, SLOW_BYTES));
  }
}

/* False if there is no GPU at all. */
static bool test_open(void) {
  int count = 0;
  fdp_device *device = NULL;
  fdp_status status = fdp_device_cuda_open(0, &device);
  CHECK(status == FDP_OK);
  if (status != FDP_OK) return false;
  device->ops->close(device);
  CHECK(fdp_device_cuda_open(-1, &device) == FDP_INVALID_ARGUMENT);
  CHECK(strstr(fdp_last_message(), "cuda:-1: there is no such GPU: ordinals are 0 to ") != NULL);
  CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
  CHECK(fdp_device_cuda_open(count, &device) == FDP_INVALID_ARGUMENT);
  return true;
}

static void test_memory(const rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  void *nothing = NULL, *address = NULL;
  CHECK_OK(ops->memory_take(r->device, 0, &nothing));
  CHECK(nothing != NULL);
  ops->memory_drop(r->device, nothing);
  ops->memory_drop(r->device, NULL);
  CHECK(ops->memory_take(r->device, (size_t)1 << 45, &address) == FDP_OUT_OF_MEMORY);
  CHECK(strstr(fdp_last_message(), "no memory for 35184372088832 bytes: ") != NULL);
  CHECK(cudaGetLastError() == cudaSuccess); /* nobody else finds our error */
  CHECK_OK(ops->memory_take(r->device, 1000, &address));
  ops->memory_drop(r->device, address);
}

static void test_events(const rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  fdp_event *fresh = NULL;
  bool has_passed = false;
  int stop = 1;
  CHECK_OK(ops->event_open(r->device, &fresh));
  CHECK_OK(ops->event_query(r->device, fresh, &has_passed));
  CHECK(has_passed); /* never recorded */
  CHECK_OK(ops->stream_wait(r->device, r->other, fresh));
  ops->event_close(r->device, fresh);
  be_slow(r, r->stream);
  CHECK_OK(ops->event_record(r->device, r->event, r->stream));
  if (!is_short) {
    CHECK_OK(ops->event_query(r->device, r->event, &has_passed));
    CHECK(!has_passed);
    CHECK(ops->event_synchronize(r->device, r->event, 1, NULL) == FDP_TIMED_OUT);
    CHECK(strstr(fdp_last_message(), "event_synchronize: not done within 1 ms") != NULL);
    CHECK(ops->event_synchronize(r->device, r->event, 60000, &stop) == FDP_ABORTED);
  }
  CHECK_OK(ops->event_synchronize(r->device, r->event, 60000, NULL));
  CHECK_OK(ops->event_query(r->device, r->event, &has_passed));
  CHECK(has_passed);
}

/* What `other` reads must be what `stream` wrote late. */
static void test_order(const rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  static char pattern[4096], got[4096];
  char *late = NULL, *copy = NULL;
  memset(pattern, 0x5a, sizeof pattern);
  CHECK_OK(ops->memory_take(r->device, sizeof pattern, (void **)&late));
  CHECK_OK(ops->memory_take(r->device, sizeof pattern, (void **)&copy));
  CHECK_OK(ops->copy(r->device, r->stream, r->slow, pattern, sizeof pattern));
  be_slow(r, r->stream);
  CHECK_OK(ops->copy(r->device, r->stream, late, r->slow + SLOW_BYTES, sizeof pattern));
  CHECK_OK(ops->event_record(r->device, r->event, r->stream));
  CHECK_OK(ops->stream_wait(r->device, r->other, r->event));
  fdp_segment segment = {late, 0, sizeof pattern};
  CHECK_OK(ops->pack(r->device, r->other, copy, &segment, 1));
  CHECK_OK(ops->copy(r->device, r->other, got, copy, sizeof got));
  CHECK_OK(ops->event_record(r->device, r->event, r->other));
  CHECK_OK(ops->event_synchronize(r->device, r->event, 60000, NULL));
  CHECK(memcmp(got, pattern, sizeof got) == 0);
  ops->memory_drop(r->device, late);
  ops->memory_drop(r->device, copy);
}

static void test_kernels(const rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  float numbers[3] = {1, 2, 4}, got[3] = {0};
  float *at = (float *)(void *)r->slow;
  const void *sources[2] = {at, at + 64};
  fdp_sum sum = {at + 128, sources, 2, 3, {FDP_CODE_FLOAT, 32, 1}};
  fdp_strided_copy backwards = {at + 194, at + 128, 4, 1, {3}, {-4}, {4}};
  fdp_segment segment = {at + 256, 192 * 4, 12};
  CHECK_OK(ops->copy(r->device, r->stream, at, numbers, 12));
  CHECK_OK(ops->copy(r->device, r->stream, at + 64, numbers, 12));
  CHECK_OK(ops->sum(r->device, r->stream, &sum, 1));
  CHECK_OK(ops->copy_strided(r->device, r->stream, &backwards, 1));
  CHECK_OK(ops->unpack(r->device, r->stream, at, &segment, 1));
  CHECK_OK(ops->copy(r->device, r->stream, got, at + 256, 12));
  CHECK_OK(ops->copy(r->device, r->stream, got, got, 0));
  CHECK_OK(ops->event_record(r->device, r->event, r->stream));
  CHECK_OK(ops->event_synchronize(r->device, r->event, 60000, NULL));
  CHECK(got[0] == 8 && got[1] == 4 && got[2] == 2);
}

/* The queue is empty when stream_close returns, and the memory may go. */
static void test_close_waits(const rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  fdp_stream *stream = NULL;
  bool has_passed = false;
  CHECK_OK(ops->stream_open(r->device, &stream));
  be_slow(r, stream);
  CHECK_OK(ops->event_record(r->device, r->event, stream));
  ops->stream_close(r->device, stream);
  CHECK_OK(ops->event_query(r->device, r->event, &has_passed));
  CHECK(has_passed);
}

/* Asking events and taking memory in the middle of a capture on this thread leaves it whole. */
static void test_capture(const rig *r) {
  const fdp_device_ops *ops = r->device->ops;
  cudaStream_t captured = (cudaStream_t)(void *)r->other;
  cudaGraph_t graph = NULL;
  void *address = NULL;
  bool has_passed = false;
  CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK_OK(ops->copy(r->device, r->other, r->slow + SLOW_BYTES, r->slow, 4096));
  CHECK_OK(ops->event_query(r->device, r->event, &has_passed));
  CHECK_OK(ops->memory_take(r->device, 4096, &address));
  CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
  if (graph) CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  ops->memory_drop(r->device, address);
}

static void test_two(const rig *r) {
  rig peer;
  bool can = false;
  int current = -1;
  CHECK(cudaSetDevice(0) == cudaSuccess);
  if (!rig_open(&peer, 1)) return;
  test_events(&peer);
  CHECK(cudaGetDevice(&current) == cudaSuccess && current == 0);
  CHECK_OK(fdp_device_cuda_can_reach(r->device, 0, &can));
  CHECK(can);
  CHECK_OK(fdp_device_cuda_can_reach(r->device, 1, &can));
  if (can) {
    CHECK_OK(fdp_device_cuda_enable_peer(r->device, 1));
    CHECK_OK(fdp_device_cuda_enable_peer(r->device, 1));
    CHECK_OK(fdp_device_cuda_enable_peer(peer.device, 0));
    test_order(r);
    int32_t number = 21, got = 0;
    const void *sources[2] = {peer.slow, r->slow};
    fdp_sum sum = {r->slow + 256, sources, 2, 1, {FDP_CODE_INT, 32, 1}};
    const fdp_device_ops *ops = r->device->ops;
    CHECK_OK(ops->copy(peer.device, peer.stream, peer.slow, &number, sizeof number));
    CHECK_OK(ops->event_record(peer.device, peer.event, peer.stream));
    CHECK_OK(ops->stream_wait(r->device, r->stream, peer.event));
    CHECK_OK(ops->copy(r->device, r->stream, r->slow, peer.slow, sizeof number));
    CHECK_OK(ops->sum(r->device, r->stream, &sum, 1));
    CHECK_OK(ops->copy(r->device, r->stream, &got, r->slow + 256, sizeof got));
    CHECK_OK(ops->event_record(r->device, r->event, r->stream));
    CHECK_OK(ops->event_synchronize(r->device, r->event, 60000, NULL));
    CHECK(got == 42);
  } else {
    CHECK(fdp_device_cuda_enable_peer(r->device, 1) == FDP_UNSUPPORTED);
  }
  rig_close(&peer);
}

int main(int argument_count, char **arguments) {
  rig r;
  int count = 0;
  is_short = argument_count > 1 && strcmp(arguments[1], "short") == 0;
  if (test_open() && rig_open(&r, 0)) {
    test_memory(&r);
    test_events(&r);
    test_order(&r);
    test_kernels(&r);
    test_close_waits(&r);
    test_capture(&r);
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 1) test_two(&r);
    rig_close(&r);
  }
  printf("%d passed, %d failed%s\n", passed, failed, count > 1 ? "" : " (one GPU: no peers)");
  return failed > 0;
}
