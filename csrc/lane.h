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

#endif
