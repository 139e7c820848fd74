#include "device_cuda_guard.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string.h>

fdp_status fdp_cuda_check(const fdp_device *device, int code, const char *what) {
  if (code == cudaSuccess) return FDP_OK;
  (void)cudaGetLastError();
  int ordinal = device->id.ordinal;
  const char *reason = cudaGetErrorString((cudaError_t)code);
  if (code == cudaErrorMemoryAllocation) {
    return fdp_fail(FDP_OUT_OF_MEMORY, "cuda:%d: %s: %s", ordinal, what, reason);
  }
  if (code == cudaErrorNoKernelImageForDevice) {
    int major = 0, minor = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    return fdp_fail(FDP_UNSUPPORTED,
                    "cuda:%d: %s: this build has no kernels for compute capability %d.%d (see "
                    "FASTDP_CUDA_ARCHS)", ordinal, what, major, minor);
  }
  return fdp_fail(FDP_DEVICE_ERROR, "cuda:%d: %s: %s (%s, %d)", ordinal, what, reason,
                  cudaGetErrorName((cudaError_t)code), code);
}

/* True if making the device current again would not bring it to life. A thread that never used CUDA
 * has device 0 "current": to set it would cost a context, hundreds of megabytes, on a GPU that the
 * program may not use at all. Only the driver knows; where it cannot be asked, all are alive. */
static bool is_alive(const fdp_device *device, int ordinal) {
  const fdp_cuda_device *opened = (const fdp_cuda_device *)device;
  unsigned int flags = 0;
  int active = 1;
  if (!opened->get_context_state) return true;
  if (opened->get_context_state(ordinal, &flags, &active) != 0) return true;
  return active != 0;
}

static void restore_device(const fdp_cuda_guard *guard) {
  int previous = guard->previous_ordinal;
  if (previous == guard->device->id.ordinal || !is_alive(guard->device, previous)) return;
  if (cudaSetDevice(previous) != cudaSuccess) (void)cudaGetLastError();
}

/* The runtime's code; where that is an error, it came of `what`. */
static int enter(fdp_cuda_guard *guard, fdp_device *device, const char **what) {
  int previous = 0;
  guard->device = device;
  *what = "making the device current";
  int code = cudaGetDevice(&previous);
  if (code == cudaSuccess && previous != device->id.ordinal) {
    code = cudaSetDevice(device->id.ordinal);
  }
  guard->previous_ordinal = previous;
  if (code != cudaSuccess) return code;
  *what = "setting the stream capture mode";
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  code = cudaThreadExchangeStreamCaptureMode(&mode);
  guard->previous_mode = (int32_t)mode;
  if (code != cudaSuccess) restore_device(guard);
  return code;
}

fdp_status fdp_cuda_guard_enter(fdp_cuda_guard *guard, fdp_device *device) {
  const char *what;
  int code = enter(guard, device, &what);
  return fdp_cuda_check(device, code, what);
}

bool fdp_cuda_guard_enter_quietly(fdp_cuda_guard *guard, fdp_device *device) {
  const char *what;
  int code = enter(guard, device, &what);
  if (code != cudaSuccess) (void)cudaGetLastError();
  return code == cudaSuccess;
}

void fdp_cuda_guard_leave(const fdp_cuda_guard *guard) {
  enum cudaStreamCaptureMode mode = (enum cudaStreamCaptureMode)guard->previous_mode;
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) (void)cudaGetLastError();
  restore_device(guard);
}

fdp_status fdp_cuda_guard_finish(const fdp_cuda_guard *guard, int code, const char *what) {
  fdp_status status = fdp_cuda_check(guard->device, code, what);
  fdp_cuda_guard_leave(guard);
  return status;
}

void fdp_cuda_guard_finish_quietly(const fdp_cuda_guard *guard, int code) {
  if (code != cudaSuccess) (void)cudaGetLastError();
  fdp_cuda_guard_leave(guard);
}

void fdp_cuda_guard_prepare(fdp_cuda_device *device) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!driver) return;
  /* C has no cast from an object's address to a function's; POSIX promises that they are alike. */
  void *found = dlsym(driver, "cuDevicePrimaryCtxGetState");
  memcpy(&device->get_context_state, &found, sizeof found);
  (void)dlclose(driver); /* the runtime holds it */
}
