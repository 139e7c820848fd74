/* Broadcast: one source, whole, into each target. The views have been checked (fdp_view_check).
 * Borrows everything; keeps nothing after the work ran. */
#ifndef FDP_BROADCAST_H
#define FDP_BROADCAST_H

#include "context.h"

/* Same shape and dtype everywhere; strides may differ. Targets may not overlap themselves, each
 * other or the source, but a target that is the source itself (same data and strides) is skipped.
 * Streams as in fdp_scatter. */
fdp_status fdp_broadcast(fdp_context *context, const fdp_view *source, fdp_stream *source_stream,
                         const fdp_view *targets, fdp_stream *const *target_streams,
                         int32_t target_count);

#endif
