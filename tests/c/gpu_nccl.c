/* The transport over the real NCCL, on real GPUs: several ranks on the first GPU (NCCL 2.30 or
 * newer), and where there are two GPUs one rank on each, with values whose sums are exact in any
 * order, so that all must be equal. Needs neither torch nor Python. `make gpu-test`
 * builds and runs it, with the NCCL that FASTDP_NCCL names or the one beside torch.
 *
 * Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../csrc/bucket.h"
#include "../../csrc/device_cuda.h"
#include "../../csrc/gather.h"
#include "../../csrc/log.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "cases.h"

enum { MAX_RANKS = 4, SLOTS = 3, ROWS = 840, COLUMNS = 7, WHOLE = 50000 };

static int passed, failed;
static char case_name[200];

static void check(bool ok, int line, const char *text) {
  if (ok) {
    passed++;
  } else if (failed++ < 30) {
    printf("FAILED line %d: %s [%s] (last message: %s)\n", line, text, case_name,
           fdp_last_message());
  }
}

#define CHECK(condition) check((condition), __LINE__, #condition)
#define CHECK_OK(call) CHECK((call) == FDP_OK)

typedef struct map {
  const char *name;
  int32_t rank_count;
  int32_t ordinals[MAX_RANKS]; /* the first is home's */
} map;

static const map maps[] = {
    {"[0, 0]", 2, {0, 0}},       {"[0, 0, 0]", 3, {0, 0, 0}}, {"[0, 0, 0, 0]", 4, {0, 0, 0, 0}},
    {"[0, 1]", 2, {0, 1}},       {"[1, 0]", 2, {1, 0}},       {"[0, 1, 0, 1]", 4, {0, 1, 0, 1}},
    {"[1, 0, 0]", 3, {1, 0, 0}}};

static fdp_context *context;
static fdp_device *devices[MAX_RANKS];
static fdp_device_id ids[MAX_RANKS];
static fdp_stream *streams[MAX_RANKS];
static int32_t rank_count;

static void *device_bytes(int32_t rank, size_t size_bytes) {
  void *taken = NULL;
  CHECK_OK(fdp_device_memory_take(devices[rank], size_bytes, &taken));
  return taken;
}

static void finish(int32_t rank) {
  const fdp_device_ops *ops = devices[rank]->ops;
  fdp_event *event = NULL;
  CHECK_OK(ops->event_open(devices[rank], &event));
  CHECK_OK(ops->event_record(devices[rank], event, streams[rank]));
  CHECK_OK(ops->event_synchronize(devices[rank], event, 60000, NULL));
  ops->event_close(devices[rank], event);
}

static void copy_now(int32_t rank, void *target, const void *source, size_t size_bytes) {
  CHECK_OK(devices[rank]->ops->copy(devices[rank], streams[rank], target, source,
                                    (int64_t)size_bytes));
  finish(rank);
}

static fdp_view flat_view(void *data, fdp_dtype dtype, int64_t count, int32_t rank) {
  return (fdp_view){.data = data, .device = ids[rank], .dtype = dtype, .ndim = 1,
                    .shape = {count}, .strides = {1}};
}

/* Small whole numbers: whatever the dtype and the order, their sum has no rounding. */
static void store(const case_dtype *type, void *elements, int64_t index, int32_t value) {
  char *at = (char *)elements + index * type->elem_bytes;
  fdp_dtype dtype = type->dtype;
  int parts = dtype.code == FDP_CODE_COMPLEX ? 2 : 1;
  int64_t part_bytes = type->elem_bytes / parts;
  for (int part = 0; part < parts; part++) {
    double number = value + part;
    float single = (float)number;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    int64_t whole = dtype.code == FDP_CODE_BOOL ? value % 5 == 0 : value;
    uint16_t half = (uint16_t)(bits >> 16); /* bfloat16 */
    if (dtype.code != FDP_CODE_BFLOAT) {
      half = value + part == 0
                 ? 0
                 : (uint16_t)((((bits >> 23) & 0xFF) - 112) << 10 | ((bits >> 13) & 0x3FF));
    }
    const void *from = &whole;
    bool is_float = dtype.code == FDP_CODE_FLOAT || dtype.code == FDP_CODE_COMPLEX;
    if (is_float && part_bytes == 8) from = &number;
    if (is_float && part_bytes == 4) from = &single;
    if ((is_float || dtype.code == FDP_CODE_BFLOAT) && part_bytes == 2) from = &half;
    memcpy(at + part * part_bytes, from, (size_t)part_bytes);
  }
}

static void fill(const case_dtype *type, void *elements, int64_t count, int32_t rank) {
  for (int64_t i = 0; i < count; i++) store(type, elements, i, (int32_t)((i * 7 + rank * 3) % 13));
}

/* --- the verbs --- */

static void test_reduce(const case_dtype *type) {
  const int64_t count = ROWS * COLUMNS + 3;
  size_t size_bytes = (size_t)(count * type->elem_bytes);
  char *parts[MAX_RANKS], *wanted = malloc(size_bytes), *got = malloc(size_bytes);
  void *memories[MAX_RANKS], *target = device_bytes(0, size_bytes);
  fdp_view views[MAX_RANKS], target_view = flat_view(target, type->dtype, count, 0);
  for (int32_t r = 0; r < rank_count; r++) {
    parts[r] = malloc(size_bytes);
    memories[r] = device_bytes(r, size_bytes);
    fill(type, parts[r], count, r);
    copy_now(r, memories[r], parts[r], size_bytes);
    views[r] = flat_view(memories[r], type->dtype, count, r);
  }
  fdp_sum sum = {wanted, (const void *const *)parts, rank_count, count, type->dtype};
  CHECK(fdp_ref_sum(&sum, 1, NULL) == 0);
  CHECK_OK(fdp_reduce(context, views, streams, rank_count, &target_view, streams[0]));
  copy_now(0, got, target, size_bytes);
  CHECK(memcmp(got, wanted, size_bytes) == 0);
  for (int32_t r = 0; r < rank_count; r++) {
    finish(r);
    devices[r]->ops->memory_drop(devices[r], memories[r]);
    free(parts[r]);
  }
  devices[0]->ops->memory_drop(devices[0], target);
  free(wanted);
  free(got);
}

/* Scatter of what gather then brings back; along both dimensions, so plain and strided. */
static void test_round_trip(int32_t dim) {
  const int64_t lengths[] = {12 * ROWS, 12 * COLUMNS};
  size_t size_bytes = (size_t)(lengths[0] * lengths[1] * 4);
  char *sent = malloc(size_bytes), *got = malloc(size_bytes);
  void *source = device_bytes(0, size_bytes), *target = device_bytes(0, size_bytes);
  void *memories[MAX_RANKS];
  fdp_view views[MAX_RANKS];
  fdp_view whole = {.data = source, .device = ids[0], .dtype = {FDP_CODE_FLOAT, 32, 1}, .ndim = 2,
                    .shape = {lengths[0], lengths[1]}, .strides = {lengths[1], 1}};
  case_fill(sent, (int64_t)size_bytes);
  copy_now(0, source, sent, size_bytes);
  for (int32_t r = 0; r < rank_count; r++) {
    memories[r] = device_bytes(r, size_bytes);
    views[r] = whole;
    views[r].data = memories[r];
    views[r].device = ids[r];
    views[r].shape[dim] = lengths[dim] / rank_count;
    views[r].strides[0] = views[r].shape[1];
  }
  CHECK_OK(fdp_scatter(context, &whole, streams[0], views, streams, rank_count, dim));
  whole.data = target;
  CHECK_OK(fdp_gather(context, views, streams, rank_count, &whole, streams[0], dim));
  copy_now(0, got, target, size_bytes);
  CHECK(memcmp(got, sent, size_bytes) == 0);
  for (int32_t r = 0; r < rank_count; r++) {
    finish(r);
    devices[r]->ops->memory_drop(devices[r], memories[r]);
  }
  devices[0]->ops->memory_drop(devices[0], source);
  devices[0]->ops->memory_drop(devices[0], target);
  free(sent);
  free(got);
}

/* A bucket goes out to all ranks and comes back summed, many times over with no wait between: what
 * home then has is rank_count times what it sent. */
static void test_bucket(int32_t rounds) {
  static const int64_t counts[SLOTS] = {WHOLE, 7, 33};
  fdp_view prototypes[SLOTS], sources[SLOTS], flats[MAX_RANKS], slots[MAX_RANKS][SLOTS];
  const fdp_view *gradients[MAX_RANKS * SLOTS];
  void *tensors[SLOTS];
  float *values = malloc(WHOLE * sizeof *values), *got = malloc(WHOLE * sizeof *got);
  fdp_bucket *bucket = NULL;
  for (int64_t i = 0; i < WHOLE; i++) values[i] = (float)(i % 1021);
  for (int32_t k = 0; k < SLOTS; k++) {
    tensors[k] = device_bytes(0, (size_t)counts[k] * 4);
    copy_now(0, tensors[k], values, (size_t)counts[k] * 4);
    sources[k] = flat_view(tensors[k], (fdp_dtype){FDP_CODE_FLOAT, 32, 1}, counts[k], 0);
    prototypes[k] = sources[k];
  }
  CHECK_OK(fdp_bucket_open(prototypes, NULL, SLOTS, &bucket));
  int64_t size_bytes = fdp_bucket_size_bytes(bucket);
  void *sum_data = device_bytes(0, (size_t)size_bytes);
  fdp_view sum = flat_view(sum_data, sources[0].dtype, size_bytes / 4, 0);
  for (int32_t r = 0; r < rank_count; r++) {
    void *flat = device_bytes(r, (size_t)size_bytes);
    flats[r] = flat_view(flat, sources[0].dtype, size_bytes / 4, r);
    for (int32_t k = 0; k < SLOTS; k++) {
      slots[r][k] = fdp_bucket_slot(bucket, k, flat, ids[r]);
      gradients[r * SLOTS + k] = &slots[r][k];
    }
  }
  for (int32_t round = 0; round < rounds; round++) {
    CHECK_OK(fdp_bucket_broadcast(context, bucket, sources, streams[0], flats, streams,
                                  rank_count));
    CHECK_OK(fdp_bucket_reduce(context, bucket, gradients, streams, rank_count, &sum, streams[0]));
  }
  for (int32_t k = 0; k < SLOTS; k++) {
    fdp_view slot = fdp_bucket_slot(bucket, k, sum.data, ids[0]);
    int64_t wrong = 0;
    copy_now(0, got, slot.data, (size_t)counts[k] * 4);
    for (int64_t i = 0; i < counts[k]; i++) wrong += got[i] != values[i] * (float)rank_count;
    CHECK(wrong == 0);
  }
  for (int32_t r = 0; r < rank_count; r++) {
    finish(r);
    devices[r]->ops->memory_drop(devices[r], flats[r].data);
  }
  for (int32_t k = 0; k < SLOTS; k++) devices[0]->ops->memory_drop(devices[0], tensors[k]);
  devices[0]->ops->memory_drop(devices[0], sum.data);
  fdp_bucket_close(bucket);
  free(values);
  free(got);
}

/* --- the run --- */

static void sink(void *user, fdp_log_level level, const char *message) {
  (void)user;
  printf("%s: %s\n", fdp_log_level_name(level), message);
}

static void run_map(const map *who, bool many_ranks) {
  char reason[FDP_MESSAGE_BYTES] = "";
  const char *name = NULL;
  rank_count = who->rank_count;
  snprintf(case_name, sizeof case_name, "%s, %s", who->name,
           many_ranks ? "a rank each" : "a rank per GPU");
  CHECK_OK(fdp_context_open(&context));
  for (int32_t r = 0; r < rank_count; r++) {
    ids[r] = (fdp_device_id){FDP_DEVICE_CUDA, who->ordinals[r]};
    CHECK_OK(fdp_context_device(context, ids[r], &devices[r]));
    CHECK_OK(devices[r]->ops->stream_open(devices[r], &streams[r]));
  }
  fdp_status status = fdp_context_transport(context, NULL, ids[0], ids, rank_count, &name, reason,
                                            sizeof reason);
  printf("%s: %s\n", case_name, status == FDP_OK ? name : fdp_last_message());
  bool is_too_old = status == FDP_UNSUPPORTED && strstr(fdp_last_message(), "2.30 or newer");
  if (is_too_old) {
    printf("SKIPPED %s\n", case_name);
  } else {
    CHECK(status == FDP_OK);
  }
  if (status == FDP_OK) {
    for (size_t i = 0; i < CASE_DTYPES; i++) test_reduce(&case_dtypes[i]);
    test_round_trip(0);
    test_round_trip(1);
    test_bucket(1);
    test_bucket(200);
  }
  for (int32_t r = 0; r < rank_count; r++) devices[r]->ops->stream_close(devices[r], streams[r]);
  fdp_context_close(context);
}

int main(void) {
  fdp_device *first = NULL, *second = NULL;
  if (fdp_device_cuda_open(0, &first) != FDP_OK) {
    printf("0 passed, 1 failed: %s\n", fdp_last_message());
    return 1;
  }
  first->ops->close(first);
  bool has_two = fdp_device_cuda_open(1, &second) == FDP_OK;
  if (has_two) second->ops->close(second);
  setenv("FASTDP_TRANSPORT", "nccl", 1);
  setenv("FASTDP_TIMEOUT_MS", "60000", 0);
  /* Before NCCL is first used. */
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  bool many_ranks = strcmp(getenv("NCCL_MULTI_RANK_GPU_ENABLE"), "1") == 0;
  fdp_log_open(sink, NULL, FDP_LOG_INFO);
  for (size_t i = 0; i < sizeof maps / sizeof maps[0]; i++) {
    bool needs_two = false;
    for (int32_t r = 0; r < maps[i].rank_count; r++) needs_two |= maps[i].ordinals[r] > 0;
    if (!needs_two || has_two) run_map(&maps[i], many_ranks);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
