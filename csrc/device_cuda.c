#include "device_cuda.h"

#include <assert.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "device_cuda_guard.h"
#include "device_cuda_stream.h"
#include "env.h"

/* Oldest compute capability that the kernels are compiled for. */
#define OLDEST_CAPABILITY 75

typedef struct cuda_device {
  fdp_cuda_device base;
  int64_t timeout_ms;
  _Atomic uint64_t reached_peers; /* bit per ordinal: peer access is enabled */
} cuda_device;

static int ordinal_of(const fdp_device *device) { return device->id.ordinal; }

static void device_close(fdp_device *device) { free(device); }

/* ---- memory ---- */

static fdp_status fail_memory(fdp_device *device, size_t size_bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  (void)cudaGetLastError();
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) (void)cudaGetLastError();
  return fdp_fail(FDP_OUT_OF_MEMORY, "cuda:%d: no memory for %zu bytes: %zu of %zu bytes are free",
                  ordinal_of(device), size_bytes, free_bytes, total_bytes);
}

static fdp_status memory_take(fdp_device *device, size_t size_bytes, void **address) {
  fdp_cuda_guard guard;
  void *taken = NULL;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  /* Room for no bytes still has an address. */
  cudaError_t code = cudaMalloc(&taken, size_bytes > 0 ? size_bytes : FDP_ALIGNMENT_BYTES);
  if (code == cudaErrorMemoryAllocation) {
    status = fail_memory(device, size_bytes);
    fdp_cuda_guard_leave(&guard);
    return status;
  }
  status = fdp_cuda_guard_finish(&guard, (int)code, "memory_take");
  if (status != FDP_OK) return status;
  assert((uintptr_t)taken % FDP_ALIGNMENT_BYTES == 0);
  *address = taken;
  return FDP_OK;
}

static void memory_drop(fdp_device *device, void *address) {
  fdp_cuda_guard guard;
  if (!address || !fdp_cuda_guard_enter_quietly(&guard, device)) return;
  fdp_cuda_guard_finish_quietly(&guard, (int)cudaFree(address));
}

static fdp_status pinned_take(fdp_device *device, size_t size_bytes, void **address) {
  fdp_cuda_guard guard;
  void *taken = NULL;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  /* Portable: every device copies it without the driver's own staging. */
  cudaError_t code = cudaHostAlloc(&taken, size_bytes > 0 ? size_bytes : FDP_ALIGNMENT_BYTES,
                                   cudaHostAllocPortable);
  status = fdp_cuda_guard_finish(&guard, (int)code, "pinned_take");
  if (status != FDP_OK) return status;
  assert((uintptr_t)taken % FDP_ALIGNMENT_BYTES == 0);
  *address = taken;
  return FDP_OK;
}

static void pinned_drop(fdp_device *device, void *address) {
  fdp_cuda_guard guard;
  if (!address || !fdp_cuda_guard_enter_quietly(&guard, device)) return;
  fdp_cuda_guard_finish_quietly(&guard, (int)cudaFreeHost(address));
}

static fdp_status peer_reach(fdp_device *device, fdp_device *peer) {
  assert(peer->ops == device->ops);
  return fdp_device_cuda_enable_peer(device, peer->id.ordinal);
}

/* Never left: the thread is our own. */
static fdp_status make_current(fdp_device *device) {
  fdp_cuda_guard guard;
  return fdp_cuda_guard_enter(&guard, device);
}

/* ---- streams ---- */

static void stream_close(fdp_device *device, fdp_stream *stream) {
  fdp_cuda_stream_close(device, stream, ((cuda_device *)device)->timeout_ms);
}

/* ---- work ---- */

static fdp_status copy(fdp_device *device, fdp_stream *stream, void *target, const void *source,
                       int64_t size_bytes) {
  fdp_cuda_guard guard;
  if (size_bytes == 0) return FDP_OK;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  /* The addresses say which devices they are on: peers and pinned host memory too. */
  int code = (int)cudaMemcpyAsync(target, source, (size_t)size_bytes, cudaMemcpyDefault,
                                  (cudaStream_t)(void *)stream);
  return fdp_cuda_guard_finish(&guard, code, "copy");
}

static fdp_status copy_strided(fdp_device *device, fdp_stream *stream,
                               const fdp_strided_copy *copies, int32_t copy_count) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = fdp_cuda_copy_strided(copies, copy_count, stream);
  return fdp_cuda_guard_finish(&guard, code, "copy_strided");
}

static fdp_status pack(fdp_device *device, fdp_stream *stream, void *flat,
                       const fdp_segment *segments, int32_t segment_count) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = fdp_cuda_pack(flat, segments, segment_count, stream);
  return fdp_cuda_guard_finish(&guard, code, "pack");
}

static fdp_status unpack(fdp_device *device, fdp_stream *stream, const void *flat,
                         const fdp_segment *segments, int32_t segment_count) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = fdp_cuda_unpack(flat, segments, segment_count, stream);
  return fdp_cuda_guard_finish(&guard, code, "unpack");
}

static fdp_status sum(fdp_device *device, fdp_stream *stream, const fdp_sum *sums,
                      int32_t sum_count) {
  fdp_cuda_guard guard;
  fdp_status status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  int code = fdp_cuda_sum(sums, sum_count, stream);
  return fdp_cuda_guard_finish(&guard, code, "sum");
}

static const fdp_device_ops cuda_ops = {
    .name = "cuda",
    .close = device_close,
    .memory_take = memory_take,
    .memory_drop = memory_drop,
    .pinned_take = pinned_take,
    .pinned_drop = pinned_drop,
    .peer_reach = peer_reach,
    .make_current = make_current,
    .stream_open = fdp_cuda_stream_open,
    .stream_close = stream_close,
    .event_open = fdp_cuda_event_open,
    .event_close = fdp_cuda_event_close,
    .event_record = fdp_cuda_event_record,
    .stream_wait = fdp_cuda_stream_wait,
    .event_query = fdp_cuda_event_query,
    .event_synchronize = fdp_cuda_event_synchronize,
    .copy = copy,
    .copy_strided = copy_strided,
    .pack = pack,
    .unpack = unpack,
    .sum = sum,
};

/* ---- opening ---- */

/* Any driver of a CUDA major runs every minor of it. */
static fdp_status fail_driver(int ordinal) {
  int needed = CUDART_VERSION / 1000, found = 0;
  (void)cudaDriverGetVersion(&found);
  (void)cudaGetLastError();
  if (found == 0) {
    return fdp_fail(FDP_UNSUPPORTED,
                    "cuda:%d: no NVIDIA driver found; this build needs one for CUDA %d.0 or newer",
                    ordinal, needed);
  }
  return fdp_fail(FDP_UNSUPPORTED,
                  "cuda:%d: the NVIDIA driver is too old: this build needs one for CUDA %d.0 or "
                  "newer, found one for CUDA %d.%d",
                  ordinal, needed, found / 1000, found % 1000 / 10);
}

static fdp_status check_ordinal(int ordinal) {
  int count = 0;
  cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) (void)cudaGetLastError();
  if (code == cudaErrorInsufficientDriver) return fail_driver(ordinal);
  if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0)) {
    return fdp_fail(FDP_UNSUPPORTED, "cuda:%d: this machine shows no NVIDIA GPU", ordinal);
  }
  if (code != cudaSuccess) {
    return fdp_fail(FDP_DEVICE_ERROR, "cuda:%d: counting the GPUs: %s (%s)", ordinal,
                    cudaGetErrorString(code), cudaGetErrorName(code));
  }
  if (ordinal < 0 || ordinal >= count) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "cuda:%d: there is no such GPU: ordinals are 0 to %d",
                    ordinal, count - 1);
  }
  return FDP_OK;
}

static fdp_status check_capability(const fdp_device *device) {
  int major = 0, minor = 0;
  cudaError_t code =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal_of(device));
  if (code == cudaSuccess) {
    code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal_of(device));
  }
  if (code != cudaSuccess) return fdp_cuda_check(device, (int)code, "its compute capability");
  if (10 * major + minor >= OLDEST_CAPABILITY) return FDP_OK;
  return fdp_fail(FDP_UNSUPPORTED,
                  "cuda:%d: compute capability %d.%d is too old: %d.%d or newer is needed",
                  ordinal_of(device), major, minor, OLDEST_CAPABILITY / 10,
                  OLDEST_CAPABILITY % 10);
}

fdp_status fdp_device_cuda_open(int32_t ordinal, fdp_device **device) {
  cuda_device *opened = NULL;
  fdp_status status;
  FDP_TRY(check_ordinal(ordinal));
  opened = calloc(1, sizeof *opened);
  if (!opened) {
    status = fdp_fail(FDP_OUT_OF_MEMORY, "cuda:%d: no host memory for a device", ordinal);
    goto done;
  }
  fdp_device *base = &opened->base.base;
  base->ops = &cuda_ops;
  base->id = (fdp_device_id){FDP_DEVICE_CUDA, ordinal};
  FDP_TRY(check_capability(base));
  FDP_TRY(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &opened->timeout_ms));
  fdp_cuda_guard_prepare(&opened->base);
  *device = base;
  opened = NULL;
done:
  free(opened);
  return status;
}

/* ---- peers ---- */

fdp_status fdp_device_cuda_can_reach(fdp_device *device, int32_t peer_ordinal, bool *can) {
  int answer = 1; /* itself */
  cudaError_t code = cudaSuccess;
  if (peer_ordinal != ordinal_of(device)) {
    code = cudaDeviceCanAccessPeer(&answer, ordinal_of(device), peer_ordinal);
  }
  *can = code == cudaSuccess && answer != 0;
  return fdp_cuda_check(device, (int)code, "asking for peer access");
}

fdp_status fdp_device_cuda_enable_peer(fdp_device *device, int32_t peer_ordinal) {
  cuda_device *opened = (cuda_device *)device;
  bool can = false;
  if (peer_ordinal == ordinal_of(device)) return FDP_OK;
  uint64_t bit = peer_ordinal >= 0 && peer_ordinal < 64 ? (uint64_t)1 << peer_ordinal : 0;
  if (atomic_load(&opened->reached_peers) & bit) return FDP_OK;
  fdp_status status = fdp_device_cuda_can_reach(device, peer_ordinal, &can);
  if (status != FDP_OK) return status;
  if (!can) {
    return fdp_fail(FDP_UNSUPPORTED, "cuda:%d: cannot reach the memory of cuda:%d",
                    ordinal_of(device), (int)peer_ordinal);
  }
  fdp_cuda_guard guard;
  status = fdp_cuda_guard_enter(&guard, device);
  if (status != FDP_OK) return status;
  cudaError_t code = cudaDeviceEnablePeerAccess(peer_ordinal, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled) { /* by torch, say */
    (void)cudaGetLastError();
    code = cudaSuccess;
  }
  /* Without NVSwitch a GPU has eight peers at most: there are other ways to the ninth. */
  if (code == cudaErrorTooManyPeers || code == cudaErrorPeerAccessUnsupported) {
    (void)cudaGetLastError();
    fdp_cuda_guard_leave(&guard);
    return fdp_fail(FDP_UNSUPPORTED, "cuda:%d: cannot reach the memory of cuda:%d: %s",
                    ordinal_of(device), (int)peer_ordinal, cudaGetErrorString(code));
  }
  status = fdp_cuda_guard_finish(&guard, (int)code, "enabling peer access");
  if (status == FDP_OK) atomic_fetch_or(&opened->reached_peers, bit);
  return status;
}
