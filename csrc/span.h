/* A span: the stretch of memory in which the pieces of one bucket lie. A transport that carries a
 * bucket as one piece keeps it in flat scratch with the span's layout: this is the arithmetic
 * between the two, and of cutting a span into shards. Pure but for its own host memory: one thread,
 * no streams, no device. Pieces come in the order of their addresses, as the verbs make them. */
#ifndef FDP_SPAN_H
#define FDP_SPAN_H

#include "../kernels/kernels.h"
#include "status.h"

/* Bytes up to the end of the last segment. */
int64_t fdp_span_size_bytes(const fdp_segment *segments, int32_t segment_count);

/* The same segments, and between them, and up to size_bytes, one without a tensor for each gap: so
 * that packing them writes every byte. `filled` has room for 2 * segment_count + 1. Returns their
 * number. */
int32_t fdp_span_fill(const fdp_segment *segments, int32_t segment_count, int64_t size_bytes,
                      fdp_segment *filled);

/* What of the segments lies in [begin, end), into `cut`, which has room for all. Returns their
 * number. */
int32_t fdp_span_cut_segments(const fdp_segment *segments, int32_t segment_count, int64_t begin,
                              int64_t end, fdp_segment *cut);

/* Where shard `index` of `count` begins: in multiples of FDP_ALIGNMENT_BYTES, the first ones the
 * larger; for index == count the end of the span. Shards of a small span may be empty. */
int64_t fdp_span_shard_begin(int64_t size_bytes, int32_t count, int32_t index);

/* Sums that a transport may change: the arrays of sources are its own too. */
typedef struct fdp_span_sums {
  fdp_sum *sums;
  const void **sources; /* those of sums[k] start at k * rank_count */
  int32_t count;
  int32_t rank_count;
  const char *span; /* all targets lie from here on */
} fdp_span_sums;

/* A copy of `sums`. */
fdp_status fdp_span_sums_open(fdp_span_sums *copy, const fdp_sum *sums, int32_t sum_count,
                              int32_t rank_count, const void *span);
/* Safe on one that is all zeros. */
void fdp_span_sums_close(fdp_span_sums *sums);

/* What rank `rank` contributes, as segments of a flat buffer of the span's layout; there is room
 * for one per sum. Returns their number. */
int32_t fdp_span_segments(const fdp_span_sums *sums, int32_t rank, fdp_segment *segments);
/* The rank's contributions now lie in `flat`. */
void fdp_span_move(fdp_span_sums *sums, int32_t rank, const void *flat);
/* Only what lies in [begin, end) of the span, both from fdp_span_shard_begin. `shard` was opened
 * with the same sums, and is written over. */
void fdp_span_cut(const fdp_span_sums *sums, int64_t begin, int64_t end, fdp_span_sums *shard);

#endif
