/* Scatter: consecutive slices of one source along a dimension, each into a target of its own. The
 * views have been checked (fdp_view_check). Borrows everything; keeps nothing after the work
 * ran. */
#ifndef FDP_SCATTER_H
#define FDP_SCATTER_H

#include "context.h"

/* targets[i] has the source's shape but for `dim`, where the targets' sizes add up to the source's.
 * Same dtype everywhere. Targets may not overlap themselves, each other or the source. An array of
 * streams that is NULL, or an entry of it, means the device's default stream.
 * Reads source on source_stream, after all that is enqueued there. Writes targets[i] on
 * target_streams[i]. Records: source_stream waits for the last read, so that whoever frees or
 * rewrites the source on it is safe. Not so for a source in host memory on the stream NULL and a
 * target on a GPU: nobody waits, and the caller keeps the source, unchanged, until
 * target_streams[i] has passed. */
fdp_status fdp_scatter(fdp_context *context, const fdp_view *source, fdp_stream *source_stream,
                       const fdp_view *targets, fdp_stream *const *target_streams,
                       int32_t target_count, int32_t dim);

#endif
