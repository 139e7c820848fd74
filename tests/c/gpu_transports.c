/* The verbs over each transport on real GPUs, against the same verbs on the host: bit for bit. Up
 * to seven devices take part; where there are fewer GPUs, several of them share one (gpu_proxy.h),
 * which hides nothing but the wires. `make gpu-test` builds
 * and runs it; `gpu_transports short` takes a sixth of the cases.
 *
 * Each stream's work is preceded by a delay of random length, sources are spoiled right after the
 * call on their own streams, and scratch that is not in use is filled with NaNs: so a missing wait
 * has a good chance to show. Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/broadcast.h"
#include "../../csrc/bucket.h"
#include "../../csrc/device_cuda.h"
#include "../../csrc/gather.h"
#include "../../csrc/log.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "cases.h"
#include "gpu_proxy.h"

enum { MAX_RANKS = 7, SLOTS = 3, DELAY_BYTES = 64 << 20, CPU = -1 };

static int passed, failed;

static void check(bool ok, int line, const char *text, const char *name) {
  if (ok) {
    passed++;
  } else if (failed++ < 30) {
    printf("FAILED line %d: %s [%s] (last message: %s)\n", line, text, name, fdp_last_message());
  }
}

static char case_name[200];

#define CHECK(condition) check((condition), __LINE__, #condition, case_name)
#define CHECK_OK(call) CHECK((call) == FDP_OK)

/* --- who takes part --- */

/* Device numbers of home and of the ranks; CPU is the host. */
typedef struct map {
  int32_t home;
  int32_t rank_count;
  int32_t ranks[MAX_RANKS];
} map;

static const map maps[] = {
    {0, 1, {0}},          {0, 2, {0, 0}},       {0, 2, {0, 1}},
    {1, 2, {0, 1}},       {0, 3, {0, 1, 2}},    {0, 4, {2, 1, 0, 1}},
    {0, 3, {1, 1, 1}},    {3, 4, {0, 1, 2, 3}}, {0, 7, {0, 1, 2, 3, 4, 5, 6}},
    {CPU, 2, {0, 1}},     {CPU, 3, {0, 0, 1}},  {CPU, 3, {0, CPU, 1}},
    {0, 2, {CPU, 1}},     {0, 3, {CPU, 0, CPU}}};

static bool is_mixed(const map *who) {
  bool mixed = who->home == CPU;
  for (int32_t r = 0; r < who->rank_count; ++r) mixed |= who->ranks[r] == CPU;
  return mixed;
}

typedef struct place {
  fdp_device *device;
  fdp_stream *stream; /* NULL on the host */
  char *delay;        /* twice DELAY_BYTES */
} place;

static fdp_context *context; /* of the transport under test */
static fdp_context *reference;
static fdp_device *devices[MAX_RANKS];
static char *delays[MAX_RANKS];

static place place_open(int32_t number) {
  place made = {0};
  if (number == CPU) {
    CHECK_OK(fdp_context_device(context, (fdp_device_id){FDP_DEVICE_HOST, 0}, &made.device));
    return made;
  }
  made.device = devices[number];
  made.delay = delays[number];
  CHECK_OK(made.device->ops->stream_open(made.device, &made.stream));
  return made;
}

static void place_close(place *closed) {
  if (closed->stream) closed->device->ops->stream_close(closed->device, closed->stream);
}

static void finish(const place *waited) {
  fdp_event *event = NULL;
  const fdp_device_ops *ops = waited->device->ops;
  if (!waited->stream) return;
  CHECK_OK(ops->event_open(waited->device, &event));
  CHECK_OK(ops->event_record(waited->device, event, waited->stream));
  CHECK_OK(ops->event_synchronize(waited->device, event, 20000, NULL));
  ops->event_close(waited->device, event);
}

static void delay(const place *held) {
  if (!held->stream) return;
  for (int64_t i = case_below(6); i > 0; --i) {
    CHECK_OK(held->device->ops->copy(held->device, held->stream, held->delay + DELAY_BYTES,
                                     held->delay, DELAY_BYTES));
  }
}

/* --- tensors --- */

/* The same bytes on the host, for the reference, and at a place. */
typedef struct tensor {
  const place *where;
  fdp_view view; /* there */
  fdp_view host;
  char *block;     /* there */
  char *pinned[2]; /* what is put there first, and what spoils it */
  char *kept;      /* the host's own */
  int64_t block_bytes;
} tensor;

/* Row-major; with gaps, every second column of something twice as wide. */
static tensor tensor_open(const place *where, const case_dtype *type, int32_t ndim,
                          const int64_t *shape, bool has_gaps) {
  tensor made = {.where = where};
  const fdp_device_ops *ops = where->device->ops;
  int64_t stride = has_gaps ? 2 : 1;
  made.view = (fdp_view){.device = where->device->id, .dtype = type->dtype, .ndim = ndim};
  for (int32_t d = ndim - 1; d >= 0; --d) {
    made.view.shape[d] = shape[d];
    made.view.strides[d] = stride;
    stride *= shape[d];
  }
  made.block_bytes = (stride + 1) * type->elem_bytes;
  size_t size_bytes = (size_t)made.block_bytes;
  CHECK_OK(ops->memory_take(where->device, size_bytes, (void **)&made.block));
  for (int32_t i = 0; i < 2; ++i) {
    CHECK_OK(ops->pinned_take(where->device, size_bytes, (void **)&made.pinned[i]));
  }
  made.kept = malloc(size_bytes);
  case_fill(made.pinned[0], made.block_bytes);
  memset(made.pinned[1], 0xFF, size_bytes);
  memcpy(made.kept, made.pinned[0], size_bytes);
  made.view.data = made.block;
  made.host = made.view;
  made.host.data = made.kept;
  made.host.device = (fdp_device_id){FDP_DEVICE_HOST, 0};
  CHECK_OK(ops->copy(where->device, where->stream, made.block, made.pinned[1], made.block_bytes));
  return made;
}

static void tensor_close(tensor *closed) {
  fdp_device *device = closed->where->device;
  device->ops->memory_drop(device, closed->block);
  for (int32_t i = 0; i < 2; ++i) device->ops->pinned_drop(device, closed->pinned[i]);
  free(closed->kept);
}

static void put(const tensor *written, int32_t which) {
  fdp_device *device = written->where->device;
  /* What lies on the host may be read until the targets' streams have passed: not spoiled. */
  if (which == 1 && !written->where->stream) return;
  CHECK_OK(device->ops->copy(device, written->where->stream, written->block,
                             written->pinned[which], written->block_bytes));
}

/* Only what the view shows. */
static bool is_equal(const tensor *compared, const case_dtype *type, const fdp_view *host_view) {
  fdp_device *device = compared->where->device;
  bool equal = true;
  CHECK_OK(device->ops->copy(device, compared->where->stream, compared->pinned[0], compared->block,
                             compared->block_bytes));
  finish(compared->where);
  int64_t offset_bytes = (char *)host_view->data - compared->kept;
  int64_t count = fdp_view_count_elems(host_view);
  for (int64_t i = 0; i < count && equal; ++i) {
    int64_t rest = i, at = offset_bytes;
    for (int32_t d = host_view->ndim - 1; d >= 0; --d) {
      at += rest % host_view->shape[d] * host_view->strides[d] * type->elem_bytes;
      rest /= host_view->shape[d];
    }
    equal = case_difference(type, compared->pinned[0] + at, compared->kept + at, 1) < 0;
  }
  return equal;
}

/* --- one case --- */

typedef enum verb { SCATTER, GATHER, BROADCAST, REDUCE, PACK, SUM, VERB_COUNT } verb;

static bool whole_is_source(verb which) {
  return which == SCATTER || which == BROADCAST || which == PACK;
}

typedef struct setting {
  verb which;
  const map *who;
  const case_dtype *type;
  int64_t rows;
  bool has_gaps;
  fdp_bucket *bucket;
  place home;
  place ranks[MAX_RANKS];
  tensor whole[SLOTS];
  tensor parts[MAX_RANKS][SLOTS];
  int32_t whole_count;
  int32_t part_count;
} setting;

/* The tensors of one side: the bucket's slots, its flat, or one of `rows` rows. */
static int32_t open_side(setting *made, const place *where, tensor *side, bool is_flat,
                         int64_t rows) {
  int64_t shape[] = {rows, 3};
  if (made->which < PACK) {
    side[0] = tensor_open(where, made->type, 2, shape, made->has_gaps);
    return 1;
  }
  if (is_flat) {
    shape[0] = fdp_bucket_size_bytes(made->bucket) / made->type->elem_bytes;
    side[0] = tensor_open(where, made->type, 1, shape, false);
    return 1;
  }
  for (int32_t k = 0; k < SLOTS; ++k) {
    shape[0] = made->rows * (k + 1) + k;
    side[k] = tensor_open(where, made->type, 2, shape, made->has_gaps);
  }
  return SLOTS;
}

static fdp_status call(fdp_context *by, setting *made, bool on_host) {
  fdp_view whole[SLOTS], firsts[MAX_RANKS];
  const fdp_view *gradients[MAX_RANKS * SLOTS];
  fdp_stream *streams[MAX_RANKS] = {NULL}, *home = on_host ? NULL : made->home.stream;
  int32_t count = made->who->rank_count;
  for (int32_t k = 0; k < made->whole_count; ++k) {
    whole[k] = on_host ? made->whole[k].host : made->whole[k].view;
  }
  for (int32_t r = 0; r < count; ++r) {
    tensor *parts = made->parts[r];
    if (!on_host) streams[r] = made->ranks[r].stream;
    firsts[r] = on_host ? parts[0].host : parts[0].view;
    for (int32_t k = 0; k < made->part_count; ++k) {
      gradients[r * SLOTS + k] = on_host ? &parts[k].host : &parts[k].view;
      bool is_unused = made->has_gaps && k == 0; /* on all ranks: its sum is zeros */
      if (is_unused || (r + k) % 4 == 3) gradients[r * SLOTS + k] = NULL;
    }
  }
  switch (made->which) {
    case SCATTER: return fdp_scatter(by, whole, home, firsts, streams, count, 0);
    case GATHER: return fdp_gather(by, firsts, streams, count, whole, home, 0);
    case BROADCAST: return fdp_broadcast(by, whole, home, firsts, streams, count);
    case REDUCE: return fdp_reduce(by, firsts, streams, count, whole, home);
    case PACK:
      return fdp_bucket_broadcast(by, made->bucket, whole, home, firsts, streams, count);
    default: return fdp_bucket_reduce(by, made->bucket, gradients, streams, count, whole, home);
  }
}

static void put_sources(const setting *made, int32_t which) {
  if (whole_is_source(made->which)) {
    for (int32_t k = 0; k < made->whole_count; ++k) put(&made->whole[k], which);
    return;
  }
  for (int32_t r = 0; r < made->who->rank_count; ++r) {
    for (int32_t k = 0; k < made->part_count; ++k) put(&made->parts[r][k], which);
  }
}

/* Of a bucket's flat only the slots count. */
static bool flat_is_equal(const setting *made, const tensor *flat) {
  bool equal = true;
  for (int32_t k = 0; k < SLOTS; ++k) {
    fdp_view slot = fdp_bucket_slot(made->bucket, k, flat->kept, flat->host.device);
    equal &= is_equal(flat, made->type, &slot);
  }
  return equal;
}

static void check_targets(const setting *made) {
  bool is_bucket = made->which >= PACK;
  if (!whole_is_source(made->which)) {
    const tensor *whole = &made->whole[0];
    CHECK(is_bucket ? flat_is_equal(made, whole) : is_equal(whole, made->type, &whole->host));
    return;
  }
  for (int32_t r = 0; r < made->who->rank_count; ++r) {
    const tensor *part = &made->parts[r][0];
    CHECK(is_bucket ? flat_is_equal(made, part) : is_equal(part, made->type, &part->host));
  }
}

static void run_case(verb which, const map *who, const case_dtype *type, int64_t rows,
                     bool has_gaps) {
  setting made = {.which = which, .who = who, .type = type, .rows = rows, .has_gaps = has_gaps};
  bool is_cut = which == SCATTER || which == GATHER;
  fdp_view slots[SLOTS];
  for (int32_t k = 0; k < SLOTS; ++k) {
    slots[k] = (fdp_view){.dtype = type->dtype, .ndim = 2, .shape = {rows * (k + 1) + k, 3},
                          .strides = {3, 1}};
  }
  CHECK_OK(fdp_bucket_open(slots, NULL, SLOTS, &made.bucket));
  made.home = place_open(who->home);
  made.whole_count = open_side(&made, &made.home, made.whole, which == SUM,
                               is_cut ? rows * who->rank_count : rows);
  for (int32_t r = 0; r < who->rank_count; ++r) {
    made.ranks[r] = place_open(who->ranks[r]);
    made.part_count = open_side(&made, &made.ranks[r], made.parts[r], which == PACK, rows);
  }
  CHECK_OK(call(reference, &made, true));
  for (int32_t round = 0; round < 2; ++round) {
    delay(&made.home);
    for (int32_t r = 0; r < who->rank_count; ++r) delay(&made.ranks[r]);
    put_sources(&made, 0);
    CHECK_OK(call(context, &made, false));
    put_sources(&made, 1);
  }
  check_targets(&made);
  finish(&made.home);
  for (int32_t r = 0; r < who->rank_count; ++r) finish(&made.ranks[r]);
  for (int32_t k = 0; k < made.whole_count; ++k) tensor_close(&made.whole[k]);
  place_close(&made.home);
  for (int32_t r = 0; r < who->rank_count; ++r) {
    for (int32_t k = 0; k < made.part_count; ++k) tensor_close(&made.parts[r][k]);
    place_close(&made.ranks[r]);
  }
  fdp_bucket_close(made.bucket);
}

/* --- all cases --- */

static void sink(void *unused, fdp_log_level level, const char *message) {
  (void)unused;
  printf("%s: %s\n", fdp_log_level_name(level), message);
}

static void test_transport(const char *name, int32_t gpu_count, bool is_short) {
  static const case_dtype types[] = {{"float32", {FDP_CODE_FLOAT, 32, 1}, 4},
                                     {"bfloat16", {FDP_CODE_BFLOAT, 16, 1}, 2},
                                     {"int64", {FDP_CODE_INT, 64, 1}, 8}};
  /* The last in shards and chunks; of two GPUs, reductions of it are fetched, and sums of buckets
   * read in place or packed, by their dtype (gpu.mk shrinks the limits). */
  static const int64_t rows[] = {1, 37, 60001};
  setenv("FASTDP_TRANSPORT", name, 1);
  CHECK_OK(fdp_context_open(&context));
  for (int32_t k = 0; k < MAX_RANKS; ++k) {
    CHECK_OK(gpu_proxy_open(k, k % gpu_count, &devices[k]));
    CHECK_OK(fdp_context_adopt(context, devices[k]));
    CHECK_OK(fdp_pool_debug_fill(fdp_context_pool(context, devices[k])));
    CHECK_OK(devices[k]->ops->memory_take(devices[k], 2 * (size_t)DELAY_BYTES,
                                          (void **)&delays[k]));
    fdp_segment zeros = {NULL, 0, 2 * (int64_t)DELAY_BYTES};
    CHECK_OK(devices[k]->ops->pack(devices[k], NULL, delays[k], &zeros, 1));
  }
  for (size_t m = 0; m < sizeof maps / sizeof maps[0]; ++m) {
    if (is_mixed(&maps[m]) && strcmp(name, "host") != 0) continue; /* always by host */
    for (int32_t number = 0; number < VERB_COUNT * 3 * 2; ++number) {
      if (is_short && (number + (int32_t)m) % 6 != number / VERB_COUNT % 6) continue;
      verb which = (verb)(number % VERB_COUNT);
      int32_t size = number / VERB_COUNT % 3;
      bool has_gaps = number / VERB_COUNT / 3 == 1;
      const case_dtype *type = &types[(number + (int32_t)m) % 3];
      snprintf(case_name, sizeof case_name, "%s, map %d, verb %d, %s, %d rows%s", name, (int)m,
               (int)which, type->name, (int)rows[size], has_gaps ? ", gaps" : "");
      run_case(which, &maps[m], type, rows[size], has_gaps);
    }
  }
  for (int32_t k = 0; k < MAX_RANKS; ++k) {
    devices[k]->ops->memory_drop(devices[k], delays[k]);
  }
  fdp_context_close(context);
}

int main(int argument_count, char **arguments) {
  bool is_short = argument_count > 1 && strcmp(arguments[1], "short") == 0;
  fdp_device *device = NULL;
  int32_t gpu_count = 0;
  fdp_log_open(sink, NULL, FDP_LOG_WARNING);
  while (gpu_count < MAX_RANKS && fdp_device_cuda_open(gpu_count, &device) == FDP_OK) {
    device->ops->close(device);
    gpu_count++;
  }
  printf("%d GPUs\n", (int)gpu_count);
  if (gpu_count == 0) {
    printf("0 passed, 1 failed: %s\n", fdp_last_message());
    return 1;
  }
  unsetenv("FASTDP_TRANSPORT");
  CHECK_OK(fdp_context_open(&reference));
  test_transport("peer", gpu_count, is_short);
  test_transport("host", gpu_count, is_short);
  fdp_context_close(reference);
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
