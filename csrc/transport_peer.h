/* The transport between GPUs that map each other's memory. Kernels and copies ordered by events:
 * nothing spins and the host never waits, so nothing can deadlock. Scatter and gather are read by
 * the target's stream from the source's memory. Buckets go through scratch, so that a caller's
 * stream is held up only until its own tensors are read; but for large gradients, which are read
 * where they lie until they are summed (peer_sum.c).
 *
 * It reads and writes the caller's memory of one device from others. Whoever takes that memory by
 * other means than cudaMalloc (torch's expandable segments) lets peers reach it himself. */
#ifndef FDP_TRANSPORT_PEER_H
#define FDP_TRANSPORT_PEER_H

#include "peer_check.h"
#include "transport.h"

/* `timeout_ms`: of fdp_peer_book_open. */
fdp_status fdp_transport_peer_open(int64_t timeout_ms, fdp_transport **transport);
/* What it knows of pairs of GPUs, for another transport that goes the same ways. Its own. */
fdp_peer_book *fdp_transport_peer_book(const fdp_transport *transport);

#endif
