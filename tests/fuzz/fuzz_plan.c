/* Plans: a copy, a scatter or a gather by plan moves what moving element by element moves, and
 * writes nothing else; and the slots of a bucket lie apart, each with the shape it was opened
 * for. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/bucket.h"
#include "../../csrc/checks.h"
#include "../../csrc/plan.h"
#include "../../csrc/relay.h"
#include "../c/cases.h"
#include "fuzz.h"

#define ARENA_BYTES 640
#define MOST_ELEMS 40
#define MOST_PARTS 5

static char sources[ARENA_BYTES] __attribute__((aligned(64)));
static char targets[ARENA_BYTES] __attribute__((aligned(64)));
static char wanted[ARENA_BYTES] __attribute__((aligned(64)));
static char between[8 * ARENA_BYTES] __attribute__((aligned(64)));

static void fill(void) {
  for (int i = 0; i < ARENA_BYTES; ++i) {
    sources[i] = (char)(i * 7 + i / 251);
    targets[i] = wanted[i] = (char)(i * 5 + 3);
  }
}

/* Element by element, into `wanted` instead of `targets`. */
static void copy_slowly(const fdp_view *target, const fdp_view *source) {
  size_t item_bytes = fdp_dtype_bytes(target->dtype);
  for (int64_t i = 0; i < fdp_view_count_elems(target); ++i) {
    const char *item = (const char *)target->data + fuzz_offset_of(target, i);
    memcpy(wanted + (item - targets), (const char *)source->data + fuzz_offset_of(source, i),
           item_bytes);
  }
}

/* At once, or cut in two at a flat buffer. */
static void run(const fdp_copy_list *list, bool is_relayed) {
  if (!is_relayed) {
    fdp_ref_copy_strided(list->copies, list->count, NULL);
  } else if (fdp_relay_size_bytes(list->copies, list->count) <= (int64_t)sizeof between) {
    fdp_strided_copy *halves = malloc(((size_t)list->count + 1) * sizeof *halves);
    FUZZ_CHECK(halves);
    for (int half = FDP_RELAY_GATHER; half <= FDP_RELAY_SPREAD; ++half) {
      fdp_relay_plan(list->copies, list->count, (fdp_relay_half)half, between, halves);
      fdp_ref_copy_strided(halves, list->count, NULL);
    }
    free(halves);
  } else {
    fdp_ref_copy_strided(list->copies, list->count, NULL);
  }
  FUZZ_CHECK(memcmp(targets, wanted, ARENA_BYTES) == 0);
}

static bool choose_dtype(fuzz_bytes *bytes, fdp_dtype *dtype) {
  *dtype = fuzz_dtype(bytes);
  return fdp_dtype_bytes(*dtype) > 0 && fdp_dtype_bytes(*dtype) <= 16;
}

static void plan_copy(fuzz_bytes *bytes) {
  int64_t shape[8];
  fdp_dtype dtype;
  fdp_copy_list list;
  if (!choose_dtype(bytes, &dtype)) return;
  int32_t ndim = fuzz_shape(bytes, MOST_ELEMS, shape);
  fdp_view target = fuzz_tame_view(bytes, dtype, shape, ndim, targets, ARENA_BYTES);
  fdp_view source = fuzz_tame_view(bytes, dtype, shape, ndim, sources, ARENA_BYTES);
  if (fdp_view_check(&target, "target") != FDP_OK) return;
  if (fdp_view_check(&source, "source") != FDP_OK || fdp_view_overlaps_itself(&target)) return;
  fdp_copy_list_init(&list);
  copy_slowly(&target, &source);
  FUZZ_CHECK(fdp_plan_copy(&list, &target, &source) == FDP_OK);
  FUZZ_CHECK(list.size_bytes == fdp_view_size_bytes(&target));
  run(&list, fuzz_byte(bytes) % 2 == 1);
  fdp_copy_list_drop(&list);
}

/* One whole in one arena, its parts one after another in equal shares of the other. */
static void plan_slices(fuzz_bytes *bytes) {
  int64_t shape[8], sizes[MOST_PARTS];
  fdp_dtype dtype;
  fdp_copy_list list;
  fdp_view parts[MOST_PARTS];
  int32_t copy_counts[MOST_PARTS];
  if (!choose_dtype(bytes, &dtype)) return;
  int32_t ndim = fuzz_shape(bytes, MOST_ELEMS, shape);
  if (ndim == 0) return;
  int32_t dim = fuzz_below(bytes, ndim);
  fdp_plan_direction direction = fuzz_byte(bytes) % 2 ? FDP_PLAN_GATHER : FDP_PLAN_SCATTER;
  char *whole_arena = direction == FDP_PLAN_SCATTER ? sources : targets;
  char *part_arena = direction == FDP_PLAN_SCATTER ? targets : sources;
  fdp_view whole = fuzz_tame_view(bytes, dtype, shape, ndim, whole_arena, ARENA_BYTES);
  int32_t part_count = case_chunks(shape[dim], 1 + fuzz_below(bytes, MOST_PARTS), sizes);
  int64_t total = 0;
  for (int32_t i = 0; i < part_count; ++i) total += sizes[i];
  FUZZ_CHECK(total == shape[dim]);
  for (int32_t i = 0; i < part_count; ++i) {
    int64_t share = ARENA_BYTES / MOST_PARTS / 64 * 64;
    shape[dim] = sizes[i];
    parts[i] = fuzz_tame_view(bytes, dtype, shape, ndim, part_arena + i * share, share);
    if (fdp_view_check(&parts[i], "parts") != FDP_OK) return;
  }
  if (fdp_view_check(&whole, "whole") != FDP_OK) return;
  fdp_named_views named = {"parts", parts, part_count, false};
  fdp_named_views one = {"whole", &whole, 1, true};
  FUZZ_CHECK(fdp_check_slices("fuzz", named, "whole", &whole, dim) == FDP_OK);
  if (fdp_check_writable("fuzz", direction == FDP_PLAN_SCATTER ? named : one) != FDP_OK) return;
  int64_t start = 0;
  for (int32_t i = 0; i < part_count; ++i) {
    fdp_view slice = fdp_view_narrow(&whole, dim, start, sizes[i]);
    copy_slowly(direction == FDP_PLAN_SCATTER ? &parts[i] : &slice,
                direction == FDP_PLAN_SCATTER ? &slice : &parts[i]);
    start += sizes[i];
  }
  fdp_copy_list_init(&list);
  FUZZ_CHECK(fdp_plan_slices(&list, &whole, parts, part_count, dim, direction, copy_counts) ==
             FDP_OK);
  int32_t copies = 0;
  for (int32_t i = 0; i < part_count; ++i) copies += copy_counts[i];
  FUZZ_CHECK(copies == list.count && list.size_bytes == fdp_view_size_bytes(&whole));
  run(&list, fuzz_byte(bytes) % 2 == 1);
  fdp_copy_list_drop(&list);
}

static void lay_bucket(fuzz_bytes *bytes) {
  fdp_view prototypes[MOST_PARTS];
  int64_t offsets[MOST_PARTS];
  fdp_bucket *bucket = NULL;
  int32_t count = fuzz_below(bytes, MOST_PARTS + 1);
  fdp_dtype dtype = fuzz_dtype(bytes);
  for (int32_t i = 0; i < count; ++i) {
    prototypes[i] = fuzz_wild_view(bytes);
    if (prototypes[i].ndim > FDP_MAX_DIMS) prototypes[i].ndim = FDP_MAX_DIMS + 1;
    if (fuzz_byte(bytes) < 250) prototypes[i].dtype = dtype;
    offsets[i] = fuzz_number(bytes);
    /* What only the seam could bring: it checks views before a bucket is opened. */
    if (fdp_view_check(&prototypes[i], "prototypes") != FDP_OK) return;
  }
  bool is_placed = fuzz_byte(bytes) % 2 == 1;
  if (fdp_bucket_open(prototypes, is_placed ? offsets : NULL, count, &bucket) != FDP_OK) {
    FUZZ_CHECK(*fdp_last_message() != '\0');
    return;
  }
  int64_t end_bytes = 0;
  for (int32_t i = 0; i < count; ++i) {
    fdp_view slot = fdp_bucket_slot(bucket, i, NULL, prototypes[i].device);
    FUZZ_CHECK(fdp_view_same_shape(&slot, &prototypes[i]));
    FUZZ_CHECK(fdp_bucket_offset_bytes(bucket, i) >= end_bytes);
    end_bytes = fdp_bucket_offset_bytes(bucket, i) + fdp_view_size_bytes(&slot);
    FUZZ_CHECK(fdp_view_is_dense(&slot));
  }
  FUZZ_CHECK(end_bytes <= fdp_bucket_size_bytes(bucket));
  fdp_bucket_close(bucket);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes) {
  fuzz_bytes bytes = {data, size_bytes};
  fill();
  switch (fuzz_byte(&bytes) % 3) {
    case 0: plan_copy(&bytes); break;
    case 1: plan_slices(&bytes); break;
    default: lay_bucket(&bytes); break;
  }
  return 0;
}
