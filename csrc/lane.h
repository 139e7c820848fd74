/* Lanes: a transport's own streams, one for each device that needs one, opened at first use. For
 * work that belongs to no caller's stream, since a caller's may not be held up by others. A lane
 * only ever waits for what was enqueued before, so sharing it between calls can delay but never
 * lock. Any thread; one mutex. */
#ifndef FDP_LANE_H
#define FDP_LANE_H

#include "transport.h"

typedef struct fdp_lanes fdp_lanes;

fdp_status fdp_lanes_open(fdp_lanes **lanes);
/* Before the devices are closed. */
void fdp_lanes_close(fdp_lanes *lanes);
/* `base` with the lane of its device for a stream. */
fdp_status fdp_lane_of(fdp_lanes *lanes, const fdp_endpoint *base, fdp_endpoint *lane);

/* Note "default streams". A copy engine's copy between two GPUs on a legacy default stream starts
 * only when all that was enqueued on the default streams of both has run, and holds up what follows
 * on both (CUDA Programming Guide, "Peer-to-Peer Memory Copy"); it is the stream that most callers
 * compute on. So it is enqueued on a lane. */
/* Where such copies of `base` go: `base` itself, or the lane of its device if its stream is NULL,
 * which waits for that stream. fdp_lane_leave follows, and may follow if it fails. */
fdp_status fdp_lane_enter(fdp_lanes *lanes, const fdp_endpoint *base, fdp_endpoint *lane);
/* `base` waits for what was enqueued since, also after a failure, as far as that goes: whoever uses
 * the copies' memory next comes after `base`. `status` and its message, or a failure of its own. */
fdp_status fdp_lane_leave(const fdp_endpoint *lane, const fdp_endpoint *base, fdp_status status);

#endif
