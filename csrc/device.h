/* A device is a table of functions and one struct behind it. Backends: device_host.c (streams are
 * threads), device_cuda.c, and for tests a simulated one. Whoever opens a device closes it after
 * all its streams and events are gone. Every function may be called from any thread.
 *
 * Streams and events are opaque. The stream NULL is the backend's own default: on the host it means
 * "at once, on the calling thread", as torch's CPU operators run; on CUDA the legacy default
 * stream. So a framework's own stream handle can be passed as it is.
 *
 * What closes or drops has no status to give, and leaves the thread's message as it is: it may be
 * that of the failure on whose way out it is called.
 *
 * Whatever is enqueued reads its argument arrays before the call returns; the memory that they
 * point to must live until the work has run. */
#ifndef FDP_DEVICE_H
#define FDP_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/kernels.h"
#include "status.h"
#include "view.h"

typedef struct fdp_device fdp_device;
typedef struct fdp_stream fdp_stream;
typedef struct fdp_event fdp_event;

typedef struct fdp_device_ops {
  const char *name; /* "host", "cuda" */
  void (*close)(fdp_device *device);

  /* Memory, aligned to FDP_ALIGNMENT_BYTES. May block the device (cudaMalloc): never inside a step
   * that has warmed up. */
  fdp_status (*memory_take)(fdp_device *device, size_t size_bytes, void **address);
  void (*memory_drop)(fdp_device *device, void *address);
  /* Host memory, aligned in the same way, that the work of every device of this backend can read
   * and write, and copies without holding the calling thread up. */
  fdp_status (*pinned_take)(fdp_device *device, size_t size_bytes, void **address);
  void (*pinned_drop)(fdp_device *device, void *address);
  /* From now on work of `device` can read and write memory that memory_take gave on `peer`, a
   * device of the same backend. FDP_UNSUPPORTED, with the reason, where that cannot be. Enqueues
   * nothing; again is free. */
  fdp_status (*peer_reach)(fdp_device *device, fdp_device *peer);
  /* The calling thread, one of fastdp's own, works for this device from now on: for libraries that
   * ask the runtime which device is current. */
  fdp_status (*make_current)(fdp_device *device);

  fdp_status (*stream_open)(fdp_device *device, fdp_stream **stream);
  /* Waits for what was enqueued, at most `timeout_ms`, then closes. */
  void (*stream_close)(fdp_device *device, fdp_stream *stream);

  fdp_status (*event_open)(fdp_device *device, fdp_event **event);
  void (*event_close)(fdp_device *device, fdp_event *event);
  /* Records: `event` now stands for all that was enqueued on `stream` so far. Recording again
   * replaces it; a wait made before keeps the record it saw. */
  fdp_status (*event_record)(fdp_device *device, fdp_event *event, fdp_stream *stream);
  /* Writes on `stream`: all that follows runs after the event's latest record. An event never
   * recorded is no wait. The event may belong to another device of the same backend. */
  fdp_status (*stream_wait)(fdp_device *device, fdp_stream *stream, fdp_event *event);
  fdp_status (*event_query)(fdp_device *device, fdp_event *event, bool *passed);
  /* Host wait with a deadline; `abort_flag` (may be NULL) ends it early with FDP_ABORTED. */
  fdp_status (*event_synchronize)(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                  const volatile int *abort_flag);

  /* Work. Each reads and writes on `stream`. Contiguous copy within this device, or between it and
   * a device it can map (peer, or pinned host memory). */
  fdp_status (*copy)(fdp_device *device, fdp_stream *stream, void *target, const void *source,
                     int64_t size_bytes);
  fdp_status (*copy_strided)(fdp_device *device, fdp_stream *stream,
                             const fdp_strided_copy *copies, int32_t copy_count);
  fdp_status (*pack)(fdp_device *device, fdp_stream *stream, void *flat,
                     const fdp_segment *segments, int32_t segment_count);
  fdp_status (*unpack)(fdp_device *device, fdp_stream *stream, const void *flat,
                       const fdp_segment *segments, int32_t segment_count);
  fdp_status (*sum)(fdp_device *device, fdp_stream *stream, const fdp_sum *sums,
                    int32_t sum_count);
} fdp_device_ops;

/* Every backend's device struct begins with this. */
struct fdp_device {
  const fdp_device_ops *ops;
  fdp_device_id id;
};

/* memory_take, as everything outside a backend must call it: FDP_FAULT_MEMORY_TAKE is looked at. */
fdp_status fdp_device_memory_take(fdp_device *device, size_t size_bytes, void **address);
/* pinned_take, in the same way. */
fdp_status fdp_device_pinned_take(fdp_device *device, size_t size_bytes, void **address);

/* A stream together with the device it belongs to: what a verb is told to enqueue on. */
typedef struct fdp_stream_ref {
  fdp_device *device;
  fdp_stream *stream;
} fdp_stream_ref;

#endif
