/* Streams and events of a CUDA device (device_cuda.h), and the host's waits for them, which poll
 * with a deadline. A stream or an event is the driver's own handle. Private to device_cuda.c, in
 * whose table they stand: what each reads, writes and records is said in device.h. Any thread may
 * call. This header needs no CUDA header. */
#ifndef FDP_DEVICE_CUDA_STREAM_H
#define FDP_DEVICE_CUDA_STREAM_H

#include "device.h"

fdp_status fdp_cuda_stream_open(fdp_device *device, fdp_stream **stream);
/* Waits for what was enqueued, at most `timeout_ms`, then closes. NULL is fine. */
void fdp_cuda_stream_close(fdp_device *device, fdp_stream *stream, int64_t timeout_ms);
fdp_status fdp_cuda_stream_wait(fdp_device *device, fdp_stream *stream, fdp_event *event);

fdp_status fdp_cuda_event_open(fdp_device *device, fdp_event **event);
void fdp_cuda_event_close(fdp_device *device, fdp_event *event); /* NULL is fine */
fdp_status fdp_cuda_event_record(fdp_device *device, fdp_event *event, fdp_stream *stream);
fdp_status fdp_cuda_event_query(fdp_device *device, fdp_event *event, bool *passed);
fdp_status fdp_cuda_event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                      const volatile int *abort_flag);

#endif
