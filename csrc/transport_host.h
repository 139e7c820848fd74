/* The transport that joins anything: bytes leave the source's memory for pinned host memory on the
 * source's stream, and leave that on the target's stream after an event. Between GPUs the host
 * never waits, and no caller's stream waits for more than the reads of its own memory. What goes to
 * host memory is waited for, with the deadline of fdp_order_open.
 *
 * What comes from host memory is copied straight to a GPU, if it is contiguous: pinned memory
 * without blocking, pageable memory as the driver does it. Else the calling thread packs it
 * first. */
#ifndef FDP_TRANSPORT_HOST_H
#define FDP_TRANSPORT_HOST_H

#include "transport.h"

fdp_status fdp_transport_host_open(fdp_transport **transport);

#endif
