/* The calling thread's current CUDA device: made another for the length of one piece of work and
 * put back after it; and what a code of the runtime means. For device_cuda*.c, and for whoever
 * calls the runtime or NCCL himself. Any thread, each for itself; nothing is enqueued. This header
 * needs no CUDA header. */
#ifndef FDP_DEVICE_CUDA_GUARD_H
#define FDP_DEVICE_CUDA_GUARD_H

#include "device.h"

/* What the calling thread had before a device was made current. */
typedef struct fdp_cuda_guard {
  fdp_device *device;
  int32_t previous_ordinal;
  int32_t previous_mode; /* of stream capture */
} fdp_cuda_guard;

/* Makes `device` current on the calling thread, and capture mode relaxed, so that taking memory or
 * asking an event breaks no capture of another stream. After FDP_OK it is left again, on the same
 * thread. */
fdp_status fdp_cuda_guard_enter(fdp_cuda_guard *guard, fdp_device *device);
void fdp_cuda_guard_leave(const fdp_cuda_guard *guard);
/* The same for what closes: it tells nobody of its failures, and leaves the thread's message, which
 * may be that of the failure it cleans up after. True: the guard was entered. */
bool fdp_cuda_guard_enter_quietly(fdp_cuda_guard *guard, fdp_device *device);
void fdp_cuda_guard_finish_quietly(const fdp_cuda_guard *guard, int code);
/* Leaves with the status of the one call that was made under the guard: fdp_cuda_check, then
 * fdp_cuda_guard_leave. */
fdp_status fdp_cuda_guard_finish(const fdp_cuda_guard *guard, int code, const char *what);

/* The status of a runtime error code (0: FDP_OK), with the message "cuda:1: <what>: <reason>".
 * Takes the error off the runtime's error state. */
fdp_status fdp_cuda_check(const fdp_device *device, int code, const char *what);

/* Begins the struct of a CUDA device. */
typedef struct fdp_cuda_device {
  fdp_device base;
  int (*get_context_state)(int ordinal, unsigned int *flags, int *active); /* may be NULL */
} fdp_cuda_device;

/* Sets get_context_state. The runtime has loaded the driver. */
void fdp_cuda_guard_prepare(fdp_cuda_device *device);

#endif
