/* Buckets: layout, both verbs over products of cases, and every refusal. */
#include <stdio.h>
#include <string.h>

#include "../../csrc/bucket.h"
#include "../../csrc/counters.h"
#include "../../csrc/fault.h"
#include "check.h"
#include "rig.h"

enum { SLOTS = 9 };

static const int64_t shapes[SLOTS][3] = {{3, 4, 5}, {1, 1, 1}, {0, 2, 7}, {2, 3, 1}, {13, 1, 1},
                                         {1, 16, 1}, {2, 2, 2}, {17, 1, 1}, {4, 4, 4}};
/* Columns are dense, so their slots keep the strides; gaps and negative ones become rows. */
static const rig_layout layouts[SLOTS] = {RIG_COLUMNS, RIG_ROWS, RIG_ROWS, RIG_GAPS, RIG_NEGATIVE,
                                          RIG_ROWS, RIG_COLUMNS, RIG_SHIFTED, RIG_ROWS};

static void open_tensors(rig_array *arrays, fdp_view *views, fdp_dtype dtype, fdp_device_id device,
                         int32_t shift) {
  for (int32_t k = 0; k < SLOTS; ++k) {
    rig_layout layout = (rig_layout)(((int32_t)layouts[k] + shift) % RIG_LAYOUT_COUNT);
    arrays[k] = rig_array_open(dtype, 3, shapes[k], layout, device);
    views[k] = arrays[k].view;
    rig_fill(&arrays[k], shift * 100 + k);
  }
}

static void close_tensors(rig_array *arrays) {
  for (int32_t k = 0; k < SLOTS; ++k) rig_array_close(&arrays[k]);
}

static void test_layout(void) {
  rig_array arrays[SLOTS];
  fdp_view views[SLOTS];
  fdp_bucket *bucket = NULL;
  open_tensors(arrays, views, float32, host, 0);
  CHECK_OK(fdp_bucket_open(views, NULL, SLOTS, &bucket));
  CHECK_EQUAL(fdp_bucket_count(bucket), SLOTS);
  int64_t end = 0;
  _Alignas(64) static char flat[4096];
  for (int32_t k = 0; k < SLOTS; ++k) {
    check_case("slot %d", k);
    fdp_view slot = fdp_bucket_slot(bucket, k, flat, host);
    CHECK_EQUAL(fdp_bucket_offset_bytes(bucket, k) % FDP_ALIGNMENT_BYTES, 0);
    CHECK(fdp_bucket_offset_bytes(bucket, k) >= end);
    CHECK(fdp_bucket_offset_bytes(bucket, k) < end + FDP_ALIGNMENT_BYTES);
    CHECK_EQUAL((char *)slot.data - flat, fdp_bucket_offset_bytes(bucket, k));
    CHECK(fdp_view_same_shape(&slot, &views[k]));
    CHECK_EQUAL(fdp_view_is_dense(&views[k]), fdp_view_same_layout(&slot, &views[k]) ||
                                                  fdp_view_count_elems(&slot) == 0);
    CHECK(fdp_view_is_dense(&slot));
    end = fdp_bucket_offset_bytes(bucket, k) + fdp_view_size_bytes(&slot);
  }
  check_case("%s", "");
  CHECK_EQUAL(fdp_bucket_size_bytes(bucket), end);
  CHECK(fdp_bucket_slot(bucket, 3, NULL, host).data == NULL);
  fdp_bucket_close(bucket);
  /* Offsets are whole elements for any element size. */
  fdp_view triples[2] = {views[0], views[1]};
  triples[0].dtype = triples[1].dtype = (fdp_dtype){FDP_CODE_FLOAT, 8, 3};
  CHECK_OK(fdp_bucket_open(triples, NULL, 2, &bucket));
  CHECK_EQUAL(fdp_bucket_offset_bytes(bucket, 1), 192); /* after 180 bytes: 3 * 64 */
  fdp_bucket_close(bucket);
  fdp_bucket_close(NULL);
  close_tensors(arrays);
}

/* One behind the other, with a hole of three elements before slot 5. */
static void tight_offsets(const fdp_view *views, int64_t *offsets_elems) {
  int64_t end = 0;
  for (int32_t k = 0; k < SLOTS; ++k) {
    if (k == 5) end += 3;
    offsets_elems[k] = end;
    end += fdp_view_count_elems(&views[k]);
  }
}

static void test_given_offsets(void) {
  rig_array arrays[SLOTS];
  fdp_view views[SLOTS];
  int64_t offsets[SLOTS];
  fdp_bucket *bucket = NULL;
  open_tensors(arrays, views, float32, host, 0);
  tight_offsets(views, offsets);
  CHECK_OK(fdp_bucket_open(views, offsets, SLOTS, &bucket));
  for (int32_t k = 0; k < SLOTS; ++k) {
    fdp_view slot = fdp_bucket_slot(bucket, k, NULL, host);
    CHECK_EQUAL(fdp_bucket_offset_bytes(bucket, k), 4 * offsets[k]);
    CHECK(fdp_view_same_shape(&slot, &views[k]) && fdp_view_is_dense(&slot));
  }
  CHECK_EQUAL(fdp_bucket_size_bytes(bucket), 4 * (offsets[SLOTS - 1] + 64));
  fdp_bucket_close(bucket);
  /* Slot 2 is empty: between 61 and 61. */
  offsets[2] = 60;
  CHECK_FAILS(fdp_bucket_open(views, offsets, SLOTS, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: offsets[2] is 60, must be at least 61, where the slots before it end");
  offsets[0] = -1;
  CHECK_FAILS(fdp_bucket_open(views, offsets, SLOTS, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: offsets[0] is -1, must be at least 0, where the slots before it end");
  offsets[0] = INT64_MAX / 4 + 1;
  CHECK_FAILS(fdp_bucket_open(views, offsets, SLOTS, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: size overflows at prototypes[0] of 60 elements, must be at most "
              "9223372036854775807 bytes");
  close_tensors(arrays);
}

static void test_open_refuses(void) {
  fdp_view views[2] = {{.device = host, .dtype = {FDP_CODE_FLOAT, 32, 1}, .ndim = 1}};
  fdp_bucket *bucket = NULL;
  views[0].shape[0] = 4;
  views[0].strides[0] = 1;
  views[1] = views[0];
  CHECK_FAILS(fdp_bucket_open(views, NULL, 0, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: number of prototypes is 0, must be at least 1");
  views[1].dtype = float64;
  CHECK_FAILS(fdp_bucket_open(views, NULL, 2, &bucket), FDP_INVALID_TYPE,
              "bucket: prototypes[1] is float64, must be float32 as prototypes[0]");
  views[1] = views[0];
  views[1].shape[0] = -1;
  CHECK_FAILS(fdp_bucket_open(views, NULL, 2, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: prototypes[1]: size of dimension 0 is -1, must not be negative");
  views[1].shape[0] = INT64_MAX / 4;
  CHECK_FAILS(fdp_bucket_open(views, NULL, 2, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: size overflows at prototypes[1] of 2305843009213693951 elements, must be at "
              "most 9223372036854775807 bytes");
  views[1].ndim = 2;
  views[1].shape[1] = 8;
  CHECK_FAILS(fdp_bucket_open(views, NULL, 2, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: prototypes[1]: number of elements overflows, must be at most "
              "9223372036854775807");
  views[1].ndim = 65;
  CHECK_FAILS(fdp_bucket_open(views, NULL, 2, &bucket), FDP_INVALID_ARGUMENT,
              "bucket: prototypes[1] has 65 dimensions, must have 0 to 64");
  views[0].dtype = (fdp_dtype){FDP_CODE_UINT, 4, 1};
  CHECK_FAILS(fdp_bucket_open(views, NULL, 1, &bucket), FDP_INVALID_TYPE,
              "bucket: elements of dtype(1,4,1) do not fill whole bytes");
}

static bool slot_equals(const fdp_bucket *bucket, int32_t index, const fdp_view *flat,
                        const fdp_view *tensor) {
  fdp_view slot = fdp_bucket_slot(bucket, index, flat->data, flat->device);
  int64_t count = fdp_view_count_elems(&slot);
  for (int64_t i = 0; i < count; ++i) {
    if (rig_load(slot.dtype, rig_address(&slot, i)) !=
        rig_load(slot.dtype, rig_address(tensor, i))) {
      return false;
    }
  }
  return true;
}

/* The bytes between slots, and behind the last, are as they were. */
static bool gaps_hold(const fdp_bucket *bucket, const rig_array *flat) {
  int64_t at = 0;
  const unsigned char *bytes = flat->view.data;
  for (int32_t k = 0; k <= fdp_bucket_count(bucket); ++k) {
    bool is_last = k == fdp_bucket_count(bucket);
    int64_t end = is_last ? fdp_view_size_bytes(&flat->view) : fdp_bucket_offset_bytes(bucket, k);
    for (; at < end; ++at) {
      if (bytes[at] != 0xA5) return false;
    }
    if (is_last) break;
    fdp_view slot = fdp_bucket_slot(bucket, k, NULL, host);
    at += fdp_view_size_bytes(&slot);
  }
  return true;
}

static rig_array flat_open(const fdp_bucket *bucket, fdp_dtype dtype, fdp_device_id device) {
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(dtype);
  int64_t length = fdp_bucket_size_bytes(bucket) / item_bytes + 5;
  return rig_array_open(dtype, 1, &length, RIG_ROWS, device);
}

static void one_broadcast(const rig *ranks, const fdp_bucket *bucket, fdp_dtype dtype,
                          int32_t flat_count, int32_t shift) {
  rig_array arrays[SLOTS], flats[RIG_RANKS];
  fdp_view views[SLOTS], flat_views[RIG_RANKS];
  open_tensors(arrays, views, dtype, ranks->ids[0], shift);
  for (int32_t i = 0; i < flat_count; ++i) {
    flats[i] = flat_open(bucket, dtype, ranks->ids[i]);
    flat_views[i] = flats[i].view;
  }
  fdp_verb_counters before = fdp_counters_read(FDP_VERB_BUCKET_BROADCAST);
  CHECK_OK(fdp_bucket_broadcast(ranks->context, bucket, views, ranks->streams[0], flat_views,
                                ranks->streams, flat_count));
  rig_finish(ranks);
  fdp_verb_counters after = fdp_counters_read(FDP_VERB_BUCKET_BROADCAST);
  int64_t size_bytes = 0;
  for (int32_t k = 0; k < SLOTS; ++k) size_bytes += fdp_view_size_bytes(&views[k]);
  CHECK_EQUAL(after.bytes - before.bytes, size_bytes * flat_count);
  CHECK_EQUAL(after.chunks - before.chunks, (SLOTS - 1) * flat_count);
  for (int32_t i = 0; i < flat_count; ++i) {
    for (int32_t k = 0; k < SLOTS; ++k) {
      CHECK(slot_equals(bucket, k, &flat_views[i], &views[k]));
    }
    CHECK(ranks->means >= RIG_PEER || gaps_hold(bucket, &flats[i])); /* of those, not promised */
    CHECK(rig_guards_hold(&flats[i]));
    rig_array_close(&flats[i]);
  }
  close_tensors(arrays);
}

/* Which gradients are missing: a whole rank, a whole slot, or here and there. */
static bool is_missing(int32_t pattern, int32_t rank, int32_t index) {
  switch (pattern) {
    case 1: return rank == 0;
    case 2: return index == 4;
    case 3: return (rank + index) % 2 == 0;
    case 4: return true;
    default: return false;
  }
}

static void one_reduce(const rig *ranks, const fdp_bucket *bucket, fdp_dtype dtype,
                       int32_t rank_count, int32_t shift, int32_t pattern) {
  rig_array arrays[RIG_RANKS][SLOTS];
  fdp_view views[RIG_RANKS][SLOTS];
  const fdp_view *gradients[RIG_RANKS * SLOTS];
  rig_array flat = flat_open(bucket, dtype, ranks->ids[0]);
  for (int32_t r = 0; r < rank_count; ++r) {
    open_tensors(arrays[r], views[r], dtype, ranks->ids[r], (r * shift) % RIG_LAYOUT_COUNT);
    for (int32_t k = 0; k < SLOTS; ++k) {
      gradients[r * SLOTS + k] = is_missing(pattern, r, k) ? NULL : &views[r][k];
    }
  }
  CHECK_OK(fdp_bucket_reduce(ranks->context, bucket, gradients, ranks->streams, rank_count,
                             &flat.view, ranks->streams[0]));
  rig_finish(ranks);
  for (int32_t k = 0; k < SLOTS; ++k) {
    fdp_view slot = fdp_bucket_slot(bucket, k, flat.view.data, host);
    int64_t count = fdp_view_count_elems(&slot), wrong = 0;
    for (int64_t i = 0; i < count; ++i) {
      int64_t wanted = 0;
      for (int32_t r = 0; r < rank_count; ++r) {
        if (is_missing(pattern, r, k)) continue;
        wanted += rig_load(dtype, rig_address(&views[r][k], i));
      }
      wrong += rig_load(dtype, rig_address(&slot, i)) != wanted;
    }
    CHECK_EQUAL(wrong, 0);
  }
  CHECK(ranks->means == RIG_NCCL || gaps_hold(bucket, &flat));
  CHECK(rig_guards_hold(&flat));
  for (int32_t r = 0; r < rank_count; ++r) close_tensors(arrays[r]);
  rig_array_close(&flat);
}

static void test_products(rig_means means) {
  static const int32_t rank_counts[] = {1, 2, 3, 4, 7, 8};
  static const fdp_dtype dtypes[] = {{FDP_CODE_FLOAT, 32, 1}, {FDP_CODE_INT, 64, 1},
                                     {FDP_CODE_INT, 32, 1}};
  rig ranks;
  rig_open(&ranks, means);
  for (size_t d = 0; d < 3; ++d) {
    bool is_tight = d == 2;
    rig_array arrays[SLOTS];
    fdp_view views[SLOTS];
    int64_t offsets[SLOTS];
    fdp_bucket *bucket = NULL;
    open_tensors(arrays, views, dtypes[d], host, 0);
    tight_offsets(views, offsets);
    CHECK_OK(fdp_bucket_open(views, is_tight ? offsets : NULL, SLOTS, &bucket));
    close_tensors(arrays);
    for (size_t n = 0; n < sizeof rank_counts / sizeof rank_counts[0]; ++n) {
      for (int32_t shift = 0; shift < RIG_LAYOUT_COUNT; ++shift) {
        check_case("%d ranks, layouts shifted by %d%s", rank_counts[n], shift,
                   is_tight ? ", given offsets" : "");
        one_broadcast(&ranks, bucket, dtypes[d], rank_counts[n], shift);
        for (int32_t pattern = 0; pattern < 5; ++pattern) {
          check_case("%d ranks, shift %d, missing %d", rank_counts[n], shift, pattern);
          one_reduce(&ranks, bucket, dtypes[d], rank_counts[n], shift, pattern);
        }
      }
    }
    fdp_bucket_close(bucket);
  }
  check_case("%s", "");
  for (int32_t r = 0; r < RIG_RANKS; ++r) {
    CHECK_EQUAL(fdp_pool_read_stats(fdp_context_pool(ranks.context, ranks.devices[r])).lent_count,
                0);
  }
  rig_close(&ranks);
}

static void test_broadcast_refuses(fdp_context *context, const fdp_bucket *bucket,
                                   fdp_view *views) {
  rig_array flat = flat_open(bucket, float32, host);
  rig_array other = flat_open(bucket, float32, host);
  fdp_view flats[2] = {flat.view, other.view};
#define BROADCAST(count) fdp_bucket_broadcast(context, bucket, views, NULL, flats, NULL, (count))
  CHECK_OK(BROADCAST(2));
  CHECK_FAILS(BROADCAST(0), FDP_INVALID_ARGUMENT,
              "bucket_broadcast: number of flats is 0, must be 1 to 64");
  flats[1].shape[0] = 4;
  char message[200];
  snprintf(message, sizeof message,
           "bucket_broadcast: flats[1] has 16 bytes, must have at least %d",
           (int)fdp_bucket_size_bytes(bucket));
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT, message);
  flats[1] = other.view;
  flats[1].strides[0] = 2;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT, "bucket_broadcast: flats[1] has 1 dimensions or "
              "gaps, must be contiguous with one dimension");
  flats[1] = other.view;
  flats[1].dtype = int32;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_TYPE,
              "bucket_broadcast: flats[1] is int32, must be float32 as the bucket");
  flats[1] = flat.view;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT, "bucket_broadcast: flats[1] overlaps flats[0], "
              "must not, since both are written");
  flats[1] = other.view;
  fdp_view kept = views[3];
  views[3].shape[0] = 1;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT, "bucket_broadcast: sources[3] has shape (1, 3, "
              "1), must be (2, 3, 1) as slot 3 of the bucket");
  views[3] = kept;
  views[3].dtype = uint8;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_TYPE,
              "bucket_broadcast: sources[3] is uint8, must be float32 as the bucket");
  views[3] = kept;
  views[3].device = (fdp_device_id){FDP_DEVICE_CUDA, 1};
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT,
              "bucket_broadcast: sources[3] lies on cuda:1, must lie on cpu:0 as sources[0]");
  views[3] = kept;
  views[3].data = other.view.data;
  CHECK_FAILS(BROADCAST(2), FDP_INVALID_ARGUMENT,
              "bucket_broadcast: flats[1] overlaps sources[3], must not");
  views[3] = kept;
  fdp_fault_arm(FDP_FAULT_BUCKET_BROADCAST, 1);
  CHECK_FAILS(BROADCAST(2), FDP_FAULT_INJECTED, "bucket_broadcast: this call was told to fail");
  CHECK_OK(BROADCAST(2));
  rig_array_close(&flat);
  rig_array_close(&other);
}

static void test_reduce_refuses(fdp_context *context, const fdp_bucket *bucket, fdp_view *views) {
  rig_array flat = flat_open(bucket, float32, host);
  const fdp_view *gradients[2 * SLOTS];
  for (int32_t k = 0; k < 2 * SLOTS; ++k) gradients[k] = &views[k % SLOTS];
  fdp_view wrong = views[3];
  gradients[SLOTS + 3] = &wrong;
#define REDUCE(count) \
  fdp_bucket_reduce(context, bucket, gradients, NULL, (count), &flat.view, NULL)
  CHECK_OK(REDUCE(2));
  CHECK_FAILS(REDUCE(0), FDP_INVALID_ARGUMENT,
              "bucket_reduce: number of ranks is 0, must be 1 to 64");
  wrong.shape[0] = 1;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT, "bucket_reduce: gradients[1][3] has shape (1, 3, 1)"
              ", must be (2, 3, 1) as slot 3 of the bucket");
  wrong = views[3];
  wrong.dtype = float64;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_TYPE,
              "bucket_reduce: gradients[1][3] is float64, must be float32 as the bucket");
  wrong = views[3];
  wrong.device = (fdp_device_id){FDP_DEVICE_CUDA, 0};
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT, "bucket_reduce: gradients[1][3] lies on cuda:0, must"
              " lie on cpu:0 as the rank's first");
  wrong = fdp_bucket_slot(bucket, 3, flat.view.data, host); /* the slot itself is fine */
  CHECK_OK(REDUCE(2));
  wrong.data = flat.view.data;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT, "bucket_reduce: gradients[1][3] overlaps flat, must "
              "not unless it is slot 3 of it");
  wrong = views[3];
  flat.view.ndim = 0;
  CHECK_FAILS(REDUCE(2), FDP_INVALID_ARGUMENT, "bucket_reduce: flat has 0 dimensions or gaps, must "
              "be contiguous with one dimension");
  flat.view.ndim = 1;
  fdp_fault_arm(FDP_FAULT_BUCKET_REDUCE, 1);
  CHECK_FAILS(REDUCE(2), FDP_FAULT_INJECTED, "bucket_reduce: this call was told to fail");
  fdp_view prototype = {.device = host, .dtype = {FDP_CODE_FLOAT, 8, 4}, .ndim = 0};
  fdp_bucket *bytes = NULL;
  CHECK_OK(fdp_bucket_open(&prototype, NULL, 1, &bytes));
  CHECK_FAILS(fdp_bucket_reduce(context, bytes, gradients, NULL, 1, &flat.view, NULL),
              FDP_INVALID_TYPE,
              "bucket_reduce: bucket is dtype(2,8,4), must be a dtype that can be summed");
  fdp_bucket_close(bytes);
  rig_array_close(&flat);
}

void test_bucket(void) {
  test_layout();
  test_given_offsets();
  test_open_refuses();
  for (int32_t means = 0; means < RIG_MEANS_COUNT; ++means) test_products((rig_means)means);
  fdp_context *context = NULL;
  fdp_bucket *bucket = NULL;
  rig_array arrays[SLOTS];
  fdp_view views[SLOTS];
  CHECK_OK(fdp_context_open(&context));
  open_tensors(arrays, views, float32, host, 0);
  CHECK_OK(fdp_bucket_open(views, NULL, SLOTS, &bucket));
  test_broadcast_refuses(context, bucket, views);
  test_reduce_refuses(context, bucket, views);
  close_tensors(arrays);
  fdp_bucket_close(bucket);
  fdp_context_close(context);
}
