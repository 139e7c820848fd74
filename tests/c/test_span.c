/* The arithmetic of the transports: spans cut into segments, shards and chunks; copies through a
 * flat buffer. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/relay.h"
#include "../../csrc/span.h"
#include "cases.h"
#include "check.h"
#include "rig.h"

static void test_fill(void) {
  char tensor[1];
  const fdp_segment segments[] = {{tensor, 8, 4}, {tensor, 12, 52}, {tensor, 128, 1}};
  const fdp_segment wanted[] = {{NULL, 0, 8},    {tensor, 8, 4},   {tensor, 12, 52},
                                {NULL, 64, 64},  {tensor, 128, 1}, {NULL, 129, 63}};
  fdp_segment filled[7];
  CHECK_EQUAL(fdp_span_size_bytes(segments, 3), 129);
  CHECK_EQUAL(fdp_span_size_bytes(segments, 0), 0);
  CHECK_EQUAL(fdp_span_fill(segments, 3, 192, filled), 6);
  for (int32_t i = 0; i < 6; ++i) {
    CHECK(filled[i].tensor == wanted[i].tensor);
    CHECK_EQUAL(filled[i].offset_bytes, wanted[i].offset_bytes);
    CHECK_EQUAL(filled[i].size_bytes, wanted[i].size_bytes);
  }
  CHECK_EQUAL(fdp_span_fill(segments, 3, 129, filled), 5);
  CHECK_EQUAL(fdp_span_fill(NULL, 0, 0, filled), 0);
}

/* Chunks of segments together are the segments. */
static void test_cut_segments(void) {
  static char tensor[300];
  const fdp_segment segments[] = {{tensor, 0, 70}, {NULL, 70, 58}, {tensor + 70, 128, 172}};
  for (int32_t count = 1; count <= 6; ++count) {
    int64_t next[3] = {0, 70, 128}; /* of each segment, the first byte not seen yet */
    for (int32_t i = 0; i < count; ++i) {
      fdp_segment cut[3];
      int64_t begin = fdp_span_shard_begin(300, count, i);
      int64_t end = fdp_span_shard_begin(300, count, i + 1);
      int32_t cut_count = fdp_span_cut_segments(segments, 3, begin, end, cut);
      for (int32_t k = 0; k < cut_count; ++k) {
        int64_t at = cut[k].offset_bytes;
        int32_t from = at < 70 ? 0 : at < 128 ? 1 : 2;
        CHECK(at >= begin && at + cut[k].size_bytes <= end && cut[k].size_bytes > 0);
        CHECK_EQUAL(at, next[from]);
        CHECK(cut[k].tensor == (from == 1 ? NULL : tensor + at - (from == 2 ? 58 : 0)));
        next[from] += cut[k].size_bytes;
      }
    }
    CHECK(next[0] == 70 && next[1] == 128 && next[2] == 300);
  }
}

/* Shards are aligned, in order, without gaps, and differ by one block at most. */
static void test_shards(void) {
  for (int64_t size_bytes = 0; size_bytes < 2000; size_bytes += 37) {
    for (int32_t count = 1; count <= 8; ++count) {
      int64_t smallest = INT64_MAX, largest = 0;
      CHECK_EQUAL(fdp_span_shard_begin(size_bytes, count, 0), 0);
      CHECK_EQUAL(fdp_span_shard_begin(size_bytes, count, count), size_bytes);
      for (int32_t i = 0; i < count; ++i) {
        int64_t begin = fdp_span_shard_begin(size_bytes, count, i);
        int64_t length = fdp_span_shard_begin(size_bytes, count, i + 1) - begin;
        CHECK(begin == size_bytes || begin % FDP_ALIGNMENT_BYTES == 0);
        if (length < smallest) smallest = length;
        if (length > largest) largest = length;
      }
      CHECK(smallest >= 0 && largest - smallest < 2 * FDP_ALIGNMENT_BYTES);
    }
  }
}

/* The sums of all shards together touch each element once, with the same sources; a NULL stays. */
static void test_cut(void) {
  static float target[300], first[300], second[300];
  const void *sources[] = {first, NULL, first + 20, second + 20, NULL, second + 220};
  const fdp_sum sums[] = {{target, sources, 2, 17, float32, false},
                          {target + 20, sources + 2, 2, 190, float32, false},
                          {target + 220, sources + 4, 2, 80, float32, false}};
  fdp_span_sums all = {0}, shard = {0};
  CHECK_OK(fdp_span_sums_open(&all, sums, 3, 2, target));
  CHECK_OK(fdp_span_sums_open(&shard, sums, 3, 2, target));
  for (int32_t count = 1; count <= 7; ++count) {
    int32_t seen[300] = {0};
    for (int32_t i = 0; i < count; ++i) {
      int64_t begin = fdp_span_shard_begin(sizeof target, count, i);
      int64_t end = fdp_span_shard_begin(sizeof target, count, i + 1);
      fdp_span_cut(&all, begin, end, &shard);
      for (int32_t k = 0; k < shard.count; ++k) {
        const fdp_sum *sum = &shard.sums[k];
        int64_t at = (float *)sum->target - target;
        CHECK(4 * at >= begin && 4 * (at + sum->count_elems) <= end && sum->count_elems > 0);
        CHECK(sum->sources[0] == (at < 220 ? first + at : NULL));
        CHECK(sum->sources[1] == (at < 20 ? NULL : second + at));
        for (int64_t e = 0; e < sum->count_elems; ++e) seen[at + e] += 1;
      }
    }
    for (int64_t e = 0; e < 300; ++e) {
      bool is_gap = (e >= 17 && e < 20) || (e >= 210 && e < 220);
      CHECK_EQUAL(seen[e], is_gap ? 0 : 1);
    }
  }
  fdp_segment segments[3];
  char flat[sizeof target];
  CHECK_EQUAL(fdp_span_segments(&all, 1, segments), 2);
  CHECK(segments[1].tensor == second + 220);
  CHECK_EQUAL(segments[1].offset_bytes, 880);
  CHECK_EQUAL(segments[1].size_bytes, 320);
  fdp_span_move(&all, 1, flat);
  CHECK(all.sums[0].sources[1] == NULL && all.sums[1].sources[1] == flat + 80);
  CHECK(all.sums[1].sources[0] == first + 20);
  fdp_span_sums_close(&all);
  fdp_span_sums_close(&shard);
}

/* --- relays --- */

/* Gathered and spread is the same as copied, whatever the strides. */
static void test_relay(void) {
  for (int32_t round = 0; round < 500; ++round) {
    fdp_strided_copy copies[2], halves[2];
    char *targets[2][2], *sources[2]; /* of each copy: copied at once, and relayed */
    int64_t target_bytes[2];
    for (int32_t i = 0; i < 2; ++i) {
      fdp_strided_copy *copy = &copies[i];
      int64_t target_origin, source_origin;
      *copy = (fdp_strided_copy){.item_bytes = 1 + case_below(9),
                                 .ndim = (int32_t)case_below(FDP_COPY_MAX_DIMS)};
      if (copy->ndim > 3) copy->ndim = 3;
      for (int32_t d = 0; d < copy->ndim; ++d) copy->shape[d] = 1 + case_below(5);
      target_bytes[i] = case_strides(copy, 0, copy->target_strides_bytes, &target_origin);
      int64_t source_bytes = case_strides(copy, 1, copy->source_strides_bytes, &source_origin);
      sources[i] = malloc((size_t)source_bytes);
      case_fill(sources[i], source_bytes);
      for (int32_t way = 0; way < 2; ++way) targets[i][way] = calloc(1, (size_t)target_bytes[i]);
      copy->source = sources[i] + source_origin;
      copy->target = targets[i][0] + target_origin;
    }
    CHECK_EQUAL(fdp_ref_copy_strided(copies, 2, NULL), 0);
    for (int32_t i = 0; i < 2; ++i) {
      copies[i].target = targets[i][1] + ((char *)copies[i].target - targets[i][0]);
    }
    char *flat = malloc((size_t)fdp_relay_size_bytes(copies, 2));
    fdp_relay_plan(copies, 2, FDP_RELAY_GATHER, flat, halves);
    CHECK_EQUAL(fdp_ref_copy_strided(halves, 2, NULL), 0);
    fdp_relay_plan(copies, 2, FDP_RELAY_SPREAD, flat, halves);
    CHECK_EQUAL(fdp_ref_copy_strided(halves, 2, NULL), 0);
    free(flat);
    for (int32_t i = 0; i < 2; ++i) {
      CHECK(memcmp(targets[i][0], targets[i][1], (size_t)target_bytes[i]) == 0);
      for (int32_t way = 0; way < 2; ++way) free(targets[i][way]);
      free(sources[i]);
    }
  }
}

void test_span(void) {
  test_fill();
  test_cut_segments();
  test_shards();
  test_cut();
  test_relay();
}
