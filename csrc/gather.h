/* Gather: sources, one after another along a dimension, into one target. The views have been
 * checked (fdp_view_check). Borrows everything; keeps nothing after the work ran. */
#ifndef FDP_GATHER_H
#define FDP_GATHER_H

#include "context.h"

/* The mirror of fdp_scatter: sources[i] has the target's shape but for `dim`, where the sources'
 * sizes add up to the target's. The target may not overlap itself or a source; sources may overlap.
 * Reads sources[i] on source_streams[i]; writes target on target_stream; afterwards every source
 * stream waits for its read. */
fdp_status fdp_gather(fdp_context *context, const fdp_view *sources,
                      fdp_stream *const *source_streams, int32_t source_count,
                      const fdp_view *target, fdp_stream *target_stream, int32_t dim);

#endif
