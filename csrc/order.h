/* Order between streams: "what follows here runs after all that was enqueued there". One per
 * device, with one event that is used again and again: a wait keeps the record it saw (device.h),
 * so the event is free as soon as the wait is enqueued. Any thread; record and wait are made under
 * one mutex. The device is borrowed and must outlive it. */
#ifndef FDP_ORDER_H
#define FDP_ORDER_H

#include "device.h"

typedef struct fdp_order fdp_order;

/* `timeout_ms` bounds the host wait that streams of different backends need between them,
 * where the calling thread has no deadline of its own (deadline.h). */
fdp_status fdp_order_open(fdp_device *device, int64_t timeout_ms, fdp_order **order);
void fdp_order_close(fdp_order *order);

/* Records on `first`, a stream of this order's device; `then` waits for it. Does nothing when both
 * are the same stream. */
fdp_status fdp_order_after(fdp_order *order, fdp_stream *first, fdp_stream_ref then);

#endif
