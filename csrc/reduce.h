/* Reduce: the sum of the sources, in rank order, into one target. The views have been checked
 * (fdp_view_check). Borrows everything; keeps nothing after the work ran. */
#ifndef FDP_REDUCE_H
#define FDP_REDUCE_H

#include "context.h"

/* Same shape and a dtype that can be summed (fdp_dtype_can_sum) everywhere; strides may differ. The
 * target may be one of the sources (same data and strides), else it overlaps none. Sums as
 * kernels.h says: source order, fp16 and bf16 in fp32 rounded once, integers wrap, bool is "or".
 * Reads sources[i] on source_streams[i]; writes target on target_stream; afterwards every source
 * stream waits for its read. */
fdp_status fdp_reduce(fdp_context *context, const fdp_view *sources,
                      fdp_stream *const *source_streams, int32_t source_count,
                      const fdp_view *target, fdp_stream *target_stream);

#endif
