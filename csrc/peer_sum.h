/* The sum of transport_peer.c: ranks on other devices than home pack what they contribute, or leave
 * it where it lies if it is large, and home, or every device a shard of it, adds it up over the
 * peers' memory; or they copy it to home, if it is one very large tensor. The streams are as in
 * transport.h. */
#ifndef FDP_PEER_SUM_H
#define FDP_PEER_SUM_H

#include "lane.h"

fdp_status fdp_peer_sum(fdp_lanes *lanes, const fdp_endpoint *home, const fdp_endpoint *ranks,
                        int32_t rank_count, const fdp_sum *sums, int32_t sum_count, void *span,
                        int64_t span_bytes);

#endif
