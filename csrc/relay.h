/* Strided copies cut in two at a flat buffer between them: one half gathers the sources into it,
 * the other spreads it to the targets. For memories that cannot reach each other. Each copy's part
 * of the buffer starts at a multiple of FDP_ALIGNMENT_BYTES and holds its items in shape order.
 * Pure: any thread, no streams, no device. */
#ifndef FDP_RELAY_H
#define FDP_RELAY_H

#include <stdbool.h>

#include "../kernels/kernels.h"

typedef enum fdp_relay_half { FDP_RELAY_GATHER, FDP_RELAY_SPREAD } fdp_relay_half;

/* Of the flat buffer. */
int64_t fdp_relay_size_bytes(const fdp_strided_copy *copies, int32_t copy_count);
/* One half of each copy, into `halves`, which has room for copy_count. What is contiguous on both
 * sides comes out as a plain copy (ndim 0). */
void fdp_relay_plan(const fdp_strided_copy *copies, int32_t copy_count, fdp_relay_half half,
                    void *flat, fdp_strided_copy *halves);
/* True if every copy is plain (ndim 0). */
bool fdp_relay_is_plain(const fdp_strided_copy *copies, int32_t copy_count);

#endif
