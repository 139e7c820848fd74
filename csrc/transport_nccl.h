/* The transport over NCCL, for GPUs that peer does not join, and for whoever asks for it. A bucket
 * is packed into scratch, broadcast or reduced as one piece, by all devices of the call in one
 * group; scatter and gather are sends. Everything runs on the endpoints' own streams, which wait
 * there for their partners: NCCL's kernels spin, unlike peer's.
 *
 * Sums are made by NCCL, in its own order: exact wherever the sum is exact in any order, else equal
 * to other transports' but for rounding; a missing gradient counts as +0, so -0 may come out as +0.
 * What NCCL cannot sum (bool, 16-bit integers), and sums for which it has no communicators of
 * exactly these devices, or whose home contributes nothing, are gathered at home and summed there
 * in rank order, as everywhere else.
 *
 * Replicas on one GPU share a rank of NCCL and are summed first. With NCCL 2.30 or newer, and
 * NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL_NVLS_ENABLE=0 set before NCCL is first used, each has a
 * rank of its own, if all GPUs of the call have as many: slower, and there for tests on one GPU. */
#ifndef FDP_TRANSPORT_NCCL_H
#define FDP_TRANSPORT_NCCL_H

#include "peer_check.h"
#include "transport.h"

/* `timeout_ms` and `peers`: of fdp_nccl_book_open. Looks for no NCCL yet. */
fdp_status fdp_transport_nccl_open(int64_t timeout_ms, fdp_peer_book *peers,
                                   fdp_transport **transport);

#endif
