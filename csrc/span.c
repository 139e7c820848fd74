#include "span.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int64_t fdp_span_size_bytes(const fdp_segment *segments, int32_t segment_count) {
  if (segment_count == 0) return 0;
  const fdp_segment *last = &segments[segment_count - 1];
  return last->offset_bytes + last->size_bytes;
}

int32_t fdp_span_fill(const fdp_segment *segments, int32_t segment_count, int64_t size_bytes,
                      fdp_segment *filled) {
  int32_t count = 0;
  int64_t end = 0; /* all bytes before it are covered */
  for (int32_t i = 0; i < segment_count; ++i) {
    assert(segments[i].offset_bytes >= end);
    int64_t gap_bytes = segments[i].offset_bytes - end;
    if (gap_bytes > 0) filled[count++] = (fdp_segment){NULL, end, gap_bytes};
    filled[count++] = segments[i];
    end = segments[i].offset_bytes + segments[i].size_bytes;
  }
  assert(end <= size_bytes);
  if (end < size_bytes) filled[count++] = (fdp_segment){NULL, end, size_bytes - end};
  return count;
}

int32_t fdp_span_cut_segments(const fdp_segment *segments, int32_t segment_count, int64_t begin,
                              int64_t end, fdp_segment *cut) {
  int32_t count = 0;
  for (int32_t i = 0; i < segment_count; ++i) {
    int64_t first = segments[i].offset_bytes, last = first + segments[i].size_bytes;
    int64_t from = first > begin ? first : begin;
    int64_t to = last < end ? last : end;
    if (from >= to) continue;
    char *tensor = segments[i].tensor;
    cut[count++] = (fdp_segment){tensor ? tensor + (from - first) : NULL, from, to - from};
  }
  return count;
}

int64_t fdp_span_shard_begin(int64_t size_bytes, int32_t count, int32_t index) {
  assert(count > 0 && index >= 0 && index <= count);
  int64_t blocks = (size_bytes + FDP_ALIGNMENT_BYTES - 1) / FDP_ALIGNMENT_BYTES;
  int64_t larger = blocks % count; /* shards of one block more than the rest */
  int64_t begin = blocks / count * index + (index < larger ? index : larger);
  begin *= FDP_ALIGNMENT_BYTES;
  return begin < size_bytes ? begin : size_bytes;
}

fdp_status fdp_span_sums_open(fdp_span_sums *copy, const fdp_sum *sums, int32_t sum_count,
                              int32_t rank_count, const void *span) {
  size_t count = (size_t)sum_count;
  size_t row_bytes = (size_t)rank_count * sizeof(void *);
  fdp_sum *opened = malloc(count * (sizeof *opened + row_bytes) + 1);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "span: no host memory for %d sums", sum_count);
  const void **sources = (const void **)(opened + count);
  for (size_t k = 0; k < count; ++k) {
    assert(sums[k].source_count == rank_count);
    opened[k] = sums[k];
    opened[k].sources = memcpy(sources + k * (size_t)rank_count, sums[k].sources, row_bytes);
  }
  *copy = (fdp_span_sums){opened, sources, sum_count, rank_count, span};
  return FDP_OK;
}

void fdp_span_sums_close(fdp_span_sums *sums) {
  free(sums->sums);
  *sums = (fdp_span_sums){0};
}

static int64_t offset_of(const fdp_span_sums *sums, const fdp_sum *sum) {
  return (const char *)sum->target - sums->span;
}

int32_t fdp_span_segments(const fdp_span_sums *sums, int32_t rank, fdp_segment *segments) {
  int32_t count = 0;
  for (int32_t k = 0; k < sums->count; ++k) {
    const fdp_sum *sum = &sums->sums[k];
    if (!sum->sources[rank]) continue;
    segments[count++] = (fdp_segment){
        .tensor = (void *)(uintptr_t)sum->sources[rank], /* only read by pack */
        .offset_bytes = offset_of(sums, sum),
        .size_bytes = sum->count_elems * (int64_t)fdp_dtype_bytes(sum->dtype),
    };
  }
  return count;
}

void fdp_span_move(fdp_span_sums *sums, int32_t rank, const void *flat) {
  for (int32_t k = 0; k < sums->count; ++k) {
    const void **source = &sums->sources[(int64_t)k * sums->rank_count + rank];
    if (*source) *source = (const char *)flat + offset_of(sums, &sums->sums[k]);
  }
}

void fdp_span_cut(const fdp_span_sums *sums, int64_t begin, int64_t end, fdp_span_sums *shard) {
  shard->count = 0;
  for (int32_t k = 0; k < sums->count; ++k) {
    const fdp_sum *sum = &sums->sums[k];
    int64_t item_bytes = (int64_t)fdp_dtype_bytes(sum->dtype);
    int64_t first = offset_of(sums, sum);
    int64_t last = first + sum->count_elems * item_bytes;
    int64_t from = first > begin ? first : begin;
    int64_t to = last < end ? last : end;
    if (from >= to) continue;
    /* Slots start at multiples of their item, of which the alignment is a multiple, too. */
    assert((from - first) % item_bytes == 0 && (to - first) % item_bytes == 0);
    const void **row = shard->sources + (int64_t)shard->count * sums->rank_count;
    for (int32_t r = 0; r < sums->rank_count; ++r) {
      const char *source = sum->sources[r];
      row[r] = source ? source + (from - first) : NULL;
    }
    shard->sums[shard->count++] = (fdp_sum){
        .target = (char *)sum->target + (from - first),
        .sources = row,
        .source_count = sums->rank_count,
        .count_elems = (to - from) / item_bytes,
        .dtype = sum->dtype,
    };
  }
}
