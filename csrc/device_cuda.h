/* A CUDA device over the runtime API. Streams and events are the driver's own handles, so torch's
 * streams can be passed as they are, and the other way round. No function waits inside the driver:
 * host waits poll, with a deadline. Every function leaves the calling thread's current device and
 * stream capture mode as they were, and takes its own errors off the runtime's error state, so
 * nobody else finds them. Any thread may call; nothing calls CUDA before a device is opened.
 *
 * This header needs no CUDA header. Built only where FDP_WITH_CUDA is defined. */
#ifndef FDP_DEVICE_CUDA_H
#define FDP_DEVICE_CUDA_H

#include "device.h"

/* FDP_UNSUPPORTED without a driver, with one too old (message: needed and found), without a GPU or
 * with one below compute capability 7.5; FDP_INVALID_ARGUMENT for an ordinal that does not exist.
 * Waits that get no deadline of their own (stream_close) take FASTDP_TIMEOUT_MS. */
fdp_status fdp_device_cuda_open(int32_t ordinal, fdp_device **device);

/* True if kernels and copies of `device` can reach memory of the device with that ordinal. Enqueues
 * nothing, enables nothing. */
fdp_status fdp_device_cuda_can_reach(fdp_device *device, int32_t peer_ordinal, bool *can);
/* Lets `device` reach memory that the peer took with cudaMalloc; once is enough, more is free. It
 * does nothing for memory mapped by cuMemMap (torch's expandable segments). FDP_UNSUPPORTED if
 * can_reach says no, or the device has as many peers as it can. */
fdp_status fdp_device_cuda_enable_peer(fdp_device *device, int32_t peer_ordinal);

#endif
