/* The pack of transport_peer.c: a bucket leaves home's memory once, packed, and every device pulls
 * it from there or from its peers. The streams are as in transport.h. */
#ifndef FDP_PEER_PACK_H
#define FDP_PEER_PACK_H

#include "lane.h"

fdp_status fdp_peer_pack(fdp_lanes *lanes, const fdp_endpoint *home, const fdp_segment *segments,
                         int32_t segment_count, const fdp_endpoint *targets, void *const *flats,
                         int32_t target_count);

#endif
