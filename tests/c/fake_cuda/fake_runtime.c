#include "fake_runtime.h"

#include <stdlib.h>
#include <string.h>

#include "../../../kernels/kernels.h"

fake_runtime fake;

void fake_reset(void) {
  fake = (fake_runtime){.driver_version = 12020, .count = 2, .capability = 90, .can_access = 1};
}

void fake_fail(const char *function, cudaError_t code) {
  fake.failing = function;
  fake.code = code;
}

static cudaError_t answer(const char *function) {
  bool fails = fake.failing && strcmp(fake.failing, function) == 0;
  if (fails) fake.last_error = fake.code;
  return fails ? fake.code : cudaSuccess;
}

/* Of a function that acts on the current device; the tests' device is 1. */
static cudaError_t act(const char *function) {
  if (fake.current != 1 || fake.mode != cudaStreamCaptureModeRelaxed) fake.had_wrong_device = true;
  return answer(function);
}

static cudaError_t query(const char *function) {
  fake.queries++;
  if (fake.busy_queries == 0) return act(function);
  fake.busy_queries--;
  fake.last_error = cudaErrorNotReady;
  return cudaErrorNotReady;
}

cudaError_t cudaGetLastError(void) {
  cudaError_t last = fake.last_error;
  fake.last_error = cudaSuccess;
  return last;
}
const char *cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaErrorOther";
}
const char *cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorIllegalAddress ? "an illegal address" : "another error";
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = fake.driver_version;
  return answer("cudaDriverGetVersion");
}
cudaError_t cudaGetDeviceCount(int *count) {
  *count = fake.count;
  return answer("cudaGetDeviceCount");
}
cudaError_t cudaGetDevice(int *ordinal) {
  *ordinal = fake.current;
  return answer("cudaGetDevice");
}
cudaError_t cudaSetDevice(int ordinal) {
  fake.set_calls++;
  cudaError_t code = answer("cudaSetDevice");
  if (code == cudaSuccess) fake.current = ordinal;
  return code;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal) {
  (void)ordinal;
  bool is_major = attribute == cudaDevAttrComputeCapabilityMajor;
  *value = is_major ? fake.capability / 10 : fake.capability % 10;
  return answer("cudaDeviceGetAttribute");
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  (void)ordinal, (void)peer;
  *can = fake.can_access;
  return answer("cudaDeviceCanAccessPeer");
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  (void)flags;
  fake.peer_calls++;
  if (peer == fake.current) fake.had_wrong_device = true;
  return act("cudaDeviceEnablePeerAccess");
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  cudaError_t code = answer("cudaThreadExchangeStreamCaptureMode");
  enum cudaStreamCaptureMode previous = fake.mode;
  if (code == cudaSuccess) fake.mode = *mode, *mode = previous;
  return code;
}
cudaError_t cudaMalloc(void **address, size_t size_bytes) {
  cudaError_t code = act("cudaMalloc");
  if (code == cudaSuccess) *address = aligned_alloc(64, (size_bytes + 63) / 64 * 64);
  return code;
}
cudaError_t cudaFree(void *address) {
  free(address);
  return act("cudaFree");
}
cudaError_t cudaHostAlloc(void **address, size_t size_bytes, unsigned int flags) {
  cudaError_t code = act("cudaHostAlloc");
  if (flags != cudaHostAllocPortable) code = cudaErrorIllegalAddress;
  if (code == cudaSuccess) *address = aligned_alloc(64, (size_bytes + 63) / 64 * 64);
  return code;
}
cudaError_t cudaFreeHost(void *address) {
  free(address);
  return act("cudaFreeHost");
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = 1000, *total_bytes = 4000;
  return act("cudaMemGetInfo");
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size_bytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)stream;
  memcpy(target, source, kind == cudaMemcpyDefault ? size_bytes : 0);
  return act("cudaMemcpyAsync");
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
  *stream = flags == cudaStreamNonBlocking ? (cudaStream_t)(void *)&fake : NULL;
  return act("cudaStreamCreateWithFlags");
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)stream;
  return act("cudaStreamDestroy");
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)stream;
  return query("cudaStreamQuery");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  (void)stream, (void)event, (void)flags;
  return act("cudaStreamWaitEvent");
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  *event = flags == cudaEventDisableTiming ? (cudaEvent_t)(void *)&fake : NULL;
  return act("cudaEventCreateWithFlags");
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  (void)event;
  return act("cudaEventDestroy");
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  (void)event, (void)stream;
  return act("cudaEventRecord");
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  (void)event;
  return query("cudaEventQuery");
}

int fdp_cuda_copy_strided(const fdp_strided_copy *copies, int32_t copy_count, void *stream) {
  (void)copies, (void)copy_count, (void)stream;
  return act("copy_strided");
}
int fdp_cuda_pack(void *flat, const fdp_segment *segments, int32_t segment_count, void *stream) {
  (void)flat, (void)segments, (void)segment_count, (void)stream;
  return act("pack");
}
int fdp_cuda_unpack(const void *flat, const fdp_segment *segments, int32_t segment_count,
                    void *stream) {
  (void)flat, (void)segments, (void)segment_count, (void)stream;
  return act("unpack");
}
int fdp_cuda_sum(const fdp_sum *sums, int32_t sum_count, void *stream) {
  (void)sums, (void)sum_count, (void)stream;
  return act("sum");
}
