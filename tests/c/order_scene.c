#include "order_scene.h"

#include <stdlib.h>
#include <string.h>

#include "../../csrc/broadcast.h"
#include "../../csrc/gather.h"
#include "../../csrc/reduce.h"
#include "../../csrc/scatter.h"
#include "check.h"
#include "fake_gpu.h"

const order_map order_maps[ORDER_MAPS] = {
    {2, {0, 1}},    {3, {0, 1, 2}},       {4, {2, 1, 0, 1}},
    {3, {1, 1, 1}}, {7, {0, 1, 2, 3, 4, 5, 6}}, {4, {3, 1, 2, 1}},
    {4, {0, 0, 1, 1}}, {2, {0, 0}}};

bool order_verb_from_home(order_verb verb) {
  return verb == SCATTER || verb == BROADCAST || verb == BUCKET_BROADCAST || verb == LONE_BROADCAST;
}

static int32_t slots_of(order_verb verb) { return verb >= LONE_BROADCAST ? 1 : SLOTS; }
static int64_t slot_rows(int32_t slot) { return 21 * (SLOTS - slot); } /* the largest first */

static fdp_device_id gpu(int32_t ordinal) { return (fdp_device_id){FDP_DEVICE_CUDA, ordinal}; }

static rig_array open_array(const order_scene *made, int32_t device, int32_t ndim, int64_t rows,
                            rig_layout layout) {
  rig_array opened = rig_array_open(float32, ndim, (int64_t[]){rows, 2}, layout, gpu(device));
  sim_own(made->devices[device], opened.block, opened.block_bytes);
  return opened;
}

/* How many tensors; of one, the leading dimension is as given. */
static int32_t open_side(rig_array *arrays, const order_scene *made, bool is_bucket, bool is_flat,
                         int64_t rows, rig_layout layout, int32_t device) {
  if (!is_bucket || is_flat) {
    if (is_bucket) rows = fdp_bucket_size_bytes(made->bucket) / 4;
    arrays[0] = open_array(made, device, is_bucket ? 1 : 2, rows, is_bucket ? RIG_ROWS : layout);
    return 1;
  }
  for (int32_t k = 0; k < made->slot_count; ++k) {
    arrays[k] = open_array(made, device, 2, slot_rows(k), layout);
  }
  return made->slot_count;
}

static void open_bucket(order_scene *made) {
  fdp_view prototypes[SLOTS];
  for (int32_t k = 0; k < made->slot_count; ++k) {
    prototypes[k] = (fdp_view){.device = gpu(0), .dtype = float32, .ndim = 2,
                               .shape = {slot_rows(k), 2}, .strides = {2, 1}};
  }
  CHECK_OK(fdp_bucket_open(prototypes, NULL, made->slot_count, &made->bucket));
}

static fdp_stream *open_stream(const order_scene *made, const order_caller *one, stream_use use) {
  bool is_default = use == DEFAULT_FIRST ? one == made->callers
                                         : use == ANY_STREAMS && sim_choose(made->world, 2) == 0;
  return is_default ? NULL : sim_stream(made->world);
}

static void open_caller(order_scene *made, order_caller *one, order_verb verb, rig_layout layout,
                        stream_use use) {
  const order_map *where = made->where;
  bool is_bucket = verb >= BUCKET_BROADCAST;
  bool is_cut = verb == SCATTER || verb == GATHER;
  one->home = open_stream(made, one, use);
  bool from_home = order_verb_from_home(verb);
  made->whole_count = open_side(one->whole, made, is_bucket, !from_home, ROWS, layout, 0);
  for (int32_t r = 0; r < where->rank_count; ++r) {
    one->streams[r] = open_stream(made, one, use);
    made->part_count = open_side(one->parts[r], made, is_bucket, from_home,
                                 is_cut ? ROWS / where->rank_count : ROWS, layout,
                                 where->devices[r]);
  }
}

order_scene order_scene_open(order_verb verb, const char *transport, const order_map *where,
                        rig_layout layout, stream_use use) {
  order_scene made = {.where = where, .slot_count = slots_of(verb)};
  made.world = sim_open(1 + (uint64_t)use);
  fdp_device_id others[MAX_RANKS];
  char reason[200];
  const char *name = NULL;
  setenv("FASTDP_NCCL", FAKE_NCCL_PATH, 1);
  made.context = rig_context_open(transport);
  for (int32_t d = 0; d < MAX_RANKS; ++d) {
    made.devices[d] = sim_device(made.world, FDP_DEVICE_CUDA, d);
    fake_gpu_wrap(made.devices[d]);
    CHECK_OK(fdp_context_adopt(made.context, made.devices[d]));
  }
  open_bucket(&made);
  for (int32_t i = 0; i < CALLERS; ++i) open_caller(&made, &made.callers[i], verb, layout, use);
  for (int32_t r = 0; r < where->rank_count; ++r) others[r] = gpu(where->devices[r]);
  CHECK_OK(fdp_context_transport(made.context, NULL, gpu(0), others, where->rank_count, &name,
                                 reason, sizeof reason));
  made.first_wait = sim_wait_count(made.world);
  return made;
}

void order_scene_close(order_scene *made) {
  fdp_bucket_close(made->bucket);
  fdp_context_close(made->context);
  fake_gpu_finish();
  sim_close(made->world);
  for (int32_t i = 0; i < CALLERS; ++i) {
    order_caller *one = &made->callers[i];
    for (int32_t k = 0; k < made->whole_count; ++k) rig_array_close(&one->whole[k]);
    for (int32_t r = 0; r < made->where->rank_count; ++r) {
      for (int32_t k = 0; k < made->part_count; ++k) rig_array_close(&one->parts[r][k]);
    }
  }
}

fdp_status order_scene_call(const order_scene *made, const order_caller *one, order_verb verb) {
  fdp_context *context = made->context;
  fdp_stream *home = one->home, *const *streams = one->streams;
  fdp_view whole[SLOTS], firsts[MAX_RANKS];
  const fdp_view *gradients[MAX_RANKS * SLOTS];
  int32_t count = made->where->rank_count;
  for (int32_t k = 0; k < made->whole_count; ++k) whole[k] = one->whole[k].view;
  for (int32_t r = 0; r < count; ++r) {
    firsts[r] = one->parts[r][0].view;
    for (int32_t k = 0; k < made->part_count; ++k) {
      gradients[r * made->slot_count + k] = &one->parts[r][k].view;
    }
  }
  switch (verb) {
    case SCATTER: return fdp_scatter(context, whole, home, firsts, streams, count, 0);
    case GATHER: return fdp_gather(context, firsts, streams, count, whole, home, 0);
    case BROADCAST: return fdp_broadcast(context, whole, home, firsts, streams, count);
    case REDUCE: return fdp_reduce(context, firsts, streams, count, whole, home);
    case BUCKET_BROADCAST:
    case LONE_BROADCAST:
      return fdp_bucket_broadcast(context, made->bucket, whole, home, firsts, streams, count);
    default:
      return fdp_bucket_reduce(context, made->bucket, gradients, streams, count, whole, home);
  }
}

static fdp_stream *home_of(const order_scene *made, const order_caller *one) {
  return one->home ? one->home : sim_default_stream(made->devices[0]);
}

static fdp_stream *stream_of(const order_scene *made, const order_caller *one, int32_t r) {
  fdp_stream *stream = one->streams[r];
  return stream ? stream : sim_default_stream(made->devices[made->where->devices[r]]);
}

void order_scene_write_whole(const order_scene *made, const order_caller *one,
                             unsigned char value) {
  for (int32_t k = 0; k < made->whole_count; ++k) {
    sim_write(home_of(made, one), &one->whole[k].view, value);
  }
}

void order_scene_write_parts(const order_scene *made, const order_caller *one,
                             unsigned char value) {
  for (int32_t r = 0; r < made->where->rank_count; ++r) {
    for (int32_t k = 0; k < made->part_count; ++k) {
      sim_write(stream_of(made, one, r), &one->parts[r][k].view, value);
    }
  }
}

void order_scene_play(order_scene *made, order_verb verb, bool spoils_targets) {
  for (unsigned char round = 1; round <= ROUNDS; ++round) {
    order_caller *one = &made->callers[round % CALLERS];
    if (order_verb_from_home(verb)) {
      order_scene_write_whole(made, one, round);
      CHECK_OK(order_scene_call(made, one, verb));
      order_scene_write_whole(made, one, 0);
      for (int32_t r = 0; r < made->where->rank_count; ++r) {
        sim_read(stream_of(made, one, r), &one->parts[r][0].view);
      }
      if (spoils_targets) order_scene_write_parts(made, one, 0);
    } else {
      order_scene_write_parts(made, one, round);
      CHECK_OK(order_scene_call(made, one, verb));
      order_scene_write_parts(made, one, 0);
      sim_read(home_of(made, one), &one->whole[0].view);
      if (spoils_targets) order_scene_write_whole(made, one, 0);
    }
  }
  sim_run(made->world);
}

/* Every element is the number whose bytes are all ROUNDS, `times` times. */
static bool has_sum(const fdp_view *view, int32_t times) {
  float one, sum = 0;
  memset(&one, ROUNDS, sizeof one);
  for (int32_t i = 0; i < times; ++i) sum += one;
  int64_t count = fdp_view_count_elems(view);
  for (int64_t i = 0; i < count; ++i) {
    if (memcmp(rig_address(view, i), &sum, sizeof sum) != 0) return false;
  }
  return true;
}

void order_scene_check(const order_scene *made, order_verb verb) {
  const order_caller *last = &made->callers[ROUNDS % CALLERS];
  int32_t ranks = made->where->rank_count;
  if (verb == GATHER) CHECK(has_sum(&last->whole[0].view, 1));
  if (verb == REDUCE) CHECK(has_sum(&last->whole[0].view, ranks));
  for (int32_t r = 0; r < ranks && (verb == SCATTER || verb == BROADCAST); ++r) {
    CHECK(has_sum(&last->parts[r][0].view, 1));
  }
  bool is_bucket = verb >= BUCKET_BROADCAST;
  for (int32_t k = 0; k < made->slot_count && is_bucket && !order_verb_from_home(verb); ++k) {
    fdp_view slot = fdp_bucket_slot(made->bucket, k, last->whole[0].view.data, gpu(0));
    CHECK(has_sum(&slot, ranks));
  }
  for (int32_t r = 0; r < ranks && is_bucket && order_verb_from_home(verb); ++r) {
    for (int32_t k = 0; k < made->slot_count; ++k) {
      fdp_view slot = fdp_bucket_slot(made->bucket, k, last->parts[r][0].view.data, gpu(0));
      CHECK(has_sum(&slot, 1));
    }
  }
}
