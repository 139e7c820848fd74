/* The host as a device. A stream is a thread with a queue, started when the stream is opened; the
 * stream NULL runs at once on the calling thread. An operation that fails inside a stream makes the
 * stream fail for good: later work on it is skipped, its events still pass, and whoever waits for
 * one, on the host or from another stream, gets the failure. */
#ifndef FDP_DEVICE_HOST_H
#define FDP_DEVICE_HOST_H

#include "device.h"

typedef struct fdp_device_host_options {
  int32_t kind;                  /* of the device's id; 0: FDP_DEVICE_HOST, as it is */
  int32_t ordinal;               /* of the device's id; the real host is 0 */
  int64_t timeout_ms;            /* deadline of the waits that get none of their own */
  const volatile int *abort_flag; /* ends those waits early when not 0; may be NULL; borrowed */
} fdp_device_host_options;

fdp_status fdp_device_host_open(const fdp_device_host_options *options, fdp_device **device);

/* Enqueues a function: a status other than FDP_OK fails the stream, with the message that the
 * function left. `argument` must live until it ran. */
fdp_status fdp_device_host_enqueue(fdp_device *device, fdp_stream *stream,
                                   fdp_status (*run)(void *argument), void *argument);

#endif
