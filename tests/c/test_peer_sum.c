/* The ways that gradients go in the peer transport's sums (csrc/peer_sum.c), on the simulated
 * backend: which way is taken at which size, where scratch is taken and who waits for whom; that
 * all ways make the same bits; that calls which fail in the middle leave the pools in order. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/bucket.h"
#include "../../csrc/limits.h"
#include "cases.h"
#include "check.h"
#include "fake_gpu.h"
#include "rig.h"
#include "sim.h"

enum {
  MAX_RANKS = 4,
  MAX_SLOTS = 3,
  DEVICES = 3,
  CALLERS = 2,
  ROUNDS = 6, /* more than buffers that a pool keeps in flight */
  DTYPES = 5
};

/* Home is device 0. Sizes are in bytes, and multiples of all dtypes'. Bit r * MAX_SLOTS + k is
 * gradient k's of rank r. What is expected goes by the limits in the Makefile. */
typedef struct peer_case {
  int32_t rank_count;
  int32_t devices[MAX_RANKS];
  int32_t slot_count;
  int64_t sizes_bytes[MAX_SLOTS];
  const char *ways; /* of each rank: home, fetched, stays, packed, - (absent) */
  int32_t chunks;   /* sums that home makes; 0: lanes make them */
  uint32_t missing;
  uint32_t shifted; /* by one element off the alignment of the slot */
} peer_case;

#define FETCH FDP_PEER_FETCH_BYTES
#define RANK(r) (1u << (r) * MAX_SLOTS)

static const peer_case cases[] = {
    /* A lone tensor about the bounds: 64 bytes are the step of a chunk. */
    {2, {0, 1}, 1, {FDP_PEER_STAY_BYTES - 8}, "hp", 1, 0, 0},
    {2, {0, 1}, 1, {FDP_PEER_STAY_BYTES}, "hs", 1, 0, 0},
    {2, {0, 1}, 1, {FETCH - 8}, "hs", 1, 0, 0},
    {2, {0, 1}, 1, {FETCH}, "hf", 4, 0, 0},
    {2, {0, 1}, 1, {FETCH + 8}, "hf", 4, 0, 0},
    {2, {0, 1}, 1, {5 * FDP_PEER_FETCH_CHUNK_BYTES}, "hf", 5, 0, 0},
    {2, {0, 1}, 1, {5 * FDP_PEER_FETCH_CHUNK_BYTES + 72}, "hf", 5, 0, 0},
    {2, {0, 1}, 1, {1304}, "hf", 5, 0, 0},
    /* Ranks: several of one device, none on home's, some without a gradient. */
    {3, {0, 1, 1}, 1, {FETCH}, "hff", 4, 0, 0},
    {2, {1, 1}, 1, {FETCH}, "ff", 4, 0, 0},
    {4, {1, 0, 1, 0}, 1, {FETCH}, "fhfh", 4, 0, 0},
    {3, {0, 1, 1}, 1, {FETCH}, "h-f", 4, RANK(1), 0},
    {2, {0, 1}, 1, {FETCH}, "-f", 4, RANK(0), 0},
    {2, {0, 1}, 1, {FETCH}, "h-", 1, RANK(1), 0},
    /* Off the alignment: packed, in chunks of their own or of those that are fetched. */
    {2, {0, 1}, 1, {FDP_PEER_STAY_BYTES}, "hp", 1, 0, RANK(1)},
    {2, {0, 1}, 1, {2 * FDP_PEER_CHUNK_BYTES + 8}, "hp", 2, 0, RANK(1)},
    {2, {0, 1}, 1, {FETCH}, "hf", 4, 0, RANK(0)},
    {3, {0, 1, 1}, 1, {1304}, "hpf", 5, 0, RANK(1)},
    /* Three devices: shards, and nothing is fetched. */
    {3, {0, 1, 2}, 1, {FDP_PEER_SHARDED_BYTES - 8}, "hss", 1, 0, 0},
    {3, {0, 1, 2}, 1, {FETCH}, "hss", 0, 0, 0},
    {3, {0, 1, 2}, 1, {FETCH}, "hsp", 0, 0, RANK(2)},
    /* Several tensors: by their mean size, gaps included. */
    {2, {0, 1}, 2, {256, 2 * FDP_PEER_STAY_MEAN_BYTES - 256}, "hs", 2, 0, 0},
    {2, {0, 1}, 2, {256, 2 * FDP_PEER_STAY_MEAN_BYTES - 264}, "hp", 2, 0, 0},
    {2, {0, 1}, 3, {320, 320, 320}, "hs", 3, 0, 0},
    {3, {0, 1, 1}, 3, {320, 320, 320}, "hss", 3, RANK(1) | RANK(2) << 2, 0},
    {2, {0, 1}, 3, {320, 320, 320}, "h-", 3, RANK(1) * 7, 0},
    {2, {0, 1}, 3, {320, 320, 320}, "hp", 3, 0, RANK(1) << 2},
    {2, {0, 1}, 3, {320, 320, 320}, "hs", 3, RANK(1) << 2, RANK(1) << 2},
    {3, {0, 1, 1}, 3, {320, 320, 320}, "hsp", 3, 0, RANK(2)},
    {3, {0, 1, 2}, 3, {320, 320, 320}, "hpp", 0, 0, 0},
};

enum { CASES = sizeof cases / sizeof cases[0] };

static const case_dtype *type_of(int32_t number) {
  static const char *const names[DTYPES] = {"float32", "bfloat16", "int64", "bool", "float16"};
  for (int32_t i = 0; i < CASE_DTYPES; ++i) {
    if (strcmp(case_dtypes[i].name, names[number % DTYPES]) == 0) return &case_dtypes[i];
  }
  return NULL;
}

/* --- what is enqueued on whose stream --- */

typedef struct counts {
  int32_t copies;
  int32_t packs;
  int32_t sums;
  int32_t waits;
  int32_t links; /* sums over a link */
  int64_t copied_bytes;
} counts;

static const fdp_device_ops *real_ops;
static fdp_stream *watched[MAX_RANKS + 1]; /* the last is home's */
static counts seen[MAX_RANKS + 1];

static counts *seen_on(const fdp_stream *stream) {
  static counts others;
  for (int32_t i = 0; i <= MAX_RANKS; ++i) {
    if (watched[i] == stream) return &seen[i];
  }
  return &others;
}

static fdp_status copy_seen(fdp_device *device, fdp_stream *stream, void *target,
                            const void *source, int64_t size_bytes) {
  seen_on(stream)->copies += 1;
  seen_on(stream)->copied_bytes += size_bytes;
  return real_ops->copy(device, stream, target, source, size_bytes);
}

static fdp_status pack_seen(fdp_device *device, fdp_stream *stream, void *flat,
                            const fdp_segment *segments, int32_t segment_count) {
  seen_on(stream)->packs += 1;
  return real_ops->pack(device, stream, flat, segments, segment_count);
}

static fdp_status sum_seen(fdp_device *device, fdp_stream *stream, const fdp_sum *sums,
                           int32_t sum_count) {
  bool over_link = false;
  for (int32_t i = 0; i < sum_count; ++i) over_link |= sums[i].over_link;
  seen_on(stream)->sums += 1;
  seen_on(stream)->links += over_link;
  return real_ops->sum(device, stream, sums, sum_count);
}

static fdp_status wait_seen(fdp_device *device, fdp_stream *stream, fdp_event *event) {
  seen_on(stream)->waits += 1;
  return real_ops->stream_wait(device, stream, event);
}

static void watch(fdp_device *device) {
  static fdp_device_ops watching;
  real_ops = device->ops;
  watching = *real_ops;
  watching.copy = copy_seen;
  watching.pack = pack_seen;
  watching.sum = sum_seen;
  watching.stream_wait = wait_seen;
  device->ops = &watching;
}

/* --- a scene: two callers take turns, so that they share scratch, but no default streams --- */

typedef struct caller {
  fdp_stream *home;
  fdp_stream *streams[MAX_RANKS];
  rig_array flat;
  rig_array gradients[MAX_RANKS][MAX_SLOTS];
} caller;

typedef struct scene {
  const peer_case *what;
  const case_dtype *type;
  sim *world;
  fdp_context *context;
  fdp_device *devices[DEVICES];
  fdp_bucket *bucket;
  caller callers[CALLERS];
  char *expected; /* the flat, each slot added up by plain C */
} scene;

static bool has_bit(uint32_t bits, int32_t r, int32_t k) { return bits >> (r * MAX_SLOTS + k) & 1; }

static int64_t elems(const scene *made, int32_t k) {
  return made->what->sizes_bytes[k] / made->type->elem_bytes;
}

/* Both callers' gradients are the same. */
static void fill(scene *made) {
  for (int32_t r = 0; r < made->what->rank_count; ++r) {
    for (int32_t k = 0; k < made->what->slot_count; ++k) {
      int64_t size_bytes = made->what->sizes_bytes[k];
      void *first = made->callers[0].gradients[r][k].view.data;
      case_fill(first, size_bytes);
      for (int32_t i = 1; i < CALLERS; ++i) {
        memcpy(made->callers[i].gradients[r][k].view.data, first, (size_t)size_bytes);
      }
    }
  }
  for (int32_t k = 0; k < made->what->slot_count; ++k) {
    const void *sources[MAX_RANKS];
    for (int32_t r = 0; r < made->what->rank_count; ++r) {
      bool missing = has_bit(made->what->missing, r, k);
      sources[r] = missing ? NULL : made->callers[0].gradients[r][k].view.data;
    }
    fdp_sum sum = {.target = made->expected + fdp_bucket_offset_bytes(made->bucket, k),
                   .sources = sources, .source_count = made->what->rank_count,
                   .count_elems = elems(made, k), .dtype = made->type->dtype};
    CHECK_EQUAL(fdp_ref_sum(&sum, 1, NULL), 0);
  }
}

static rig_array open_array(const scene *made, int64_t count, rig_layout layout, int32_t d) {
  fdp_device *device = made->devices[d];
  rig_array opened = rig_array_open(made->type->dtype, 1, &count, layout, device->id);
  sim_own(device, opened.block, opened.block_bytes);
  return opened;
}

static void open_caller(scene *made, int32_t number, bool on_defaults) {
  caller *one = &made->callers[number];
  int64_t flat_elems = fdp_bucket_size_bytes(made->bucket) / made->type->elem_bytes;
  one->home = on_defaults ? NULL : sim_stream(made->world);
  one->flat = open_array(made, flat_elems, RIG_ROWS, 0);
  for (int32_t r = 0; r < made->what->rank_count; ++r) {
    one->streams[r] = on_defaults ? NULL : sim_stream(made->world);
    for (int32_t k = 0; k < made->what->slot_count; ++k) {
      rig_layout layout = has_bit(made->what->shifted, r, k) ? RIG_SHIFTED : RIG_ROWS;
      one->gradients[r][k] = open_array(made, elems(made, k), layout, made->what->devices[r]);
    }
  }
}

static scene scene_open(const peer_case *what, const case_dtype *type, bool fills,
                        bool on_defaults) {
  scene made = {.what = what, .type = type, .world = sim_open(1)};
  fdp_view prototypes[MAX_SLOTS];
  made.context = rig_context_open("peer");
  for (int32_t d = 0; d < DEVICES; ++d) {
    made.devices[d] = sim_device(made.world, FDP_DEVICE_CUDA, d);
    watch(made.devices[d]);
    CHECK_OK(fdp_context_adopt(made.context, made.devices[d]));
    if (fills) CHECK_OK(fdp_pool_debug_fill(fdp_context_pool(made.context, made.devices[d])));
  }
  for (int32_t k = 0; k < what->slot_count; ++k) {
    prototypes[k] = (fdp_view){.device = made.devices[0]->id, .dtype = type->dtype, .ndim = 1,
                               .shape = {elems(&made, k)}, .strides = {1}};
  }
  CHECK_OK(fdp_bucket_open(prototypes, NULL, what->slot_count, &made.bucket));
  made.expected = calloc(1, (size_t)fdp_bucket_size_bytes(made.bucket));
  for (int32_t i = 0; i < CALLERS; ++i) open_caller(&made, i, on_defaults && i == 0);
  fill(&made);
  return made;
}

static fdp_status call(scene *made, const caller *one) {
  const fdp_view *gradients[MAX_RANKS * MAX_SLOTS];
  int32_t slots = made->what->slot_count, ranks = made->what->rank_count;
  for (int32_t r = 0; r < ranks; ++r) {
    for (int32_t k = 0; k < slots; ++k) {
      bool missing = has_bit(made->what->missing, r, k);
      gradients[r * slots + k] = missing ? NULL : &one->gradients[r][k].view;
    }
  }
  return fdp_bucket_reduce(made->context, made->bucket, gradients, one->streams, ranks,
                           &one->flat.view, one->home);
}

static void check_sums(const scene *made, const caller *one) {
  for (int32_t k = 0; k < made->what->slot_count; ++k) {
    int64_t offset = fdp_bucket_offset_bytes(made->bucket, k);
    CHECK_EQUAL(case_difference(made->type, (char *)one->flat.view.data + offset,
                                made->expected + offset, elems(made, k)), -1);
  }
  CHECK(rig_guards_hold(&one->flat));
}

/* All has run. */
static void scene_close(scene *made) {
  CHECK_EQUAL(sim_race_count(made->world), 0);
  for (int32_t d = 0; d < DEVICES; ++d) {
    fdp_pool *pool = fdp_context_pool(made->context, made->devices[d]);
    CHECK_EQUAL(fdp_pool_read_stats(pool).lent_count, 0);
  }
  fdp_bucket_close(made->bucket);
  fdp_context_close(made->context);
  sim_close(made->world);
  for (int32_t i = 0; i < CALLERS; ++i) {
    caller *one = &made->callers[i];
    rig_array_close(&one->flat);
    for (int32_t r = 0; r < made->what->rank_count; ++r) {
      for (int32_t k = 0; k < made->what->slot_count; ++k) rig_array_close(&one->gradients[r][k]);
    }
  }
  free(made->expected);
}

/* --- the tests --- */

static int64_t takes_of(const scene *made, int32_t device) {
  return fdp_pool_read_stats(fdp_context_pool(made->context, made->devices[device])).device_takes;
}

/* What the first call, whose scratch nobody used before, enqueued on the ranks' streams. */
static void check_ways(const scene *made) {
  const peer_case *what = made->what;
  int64_t takes[DEVICES] = {0};
  bool over_link = false;
  int32_t parts = what->chunks == 0 ? 1 : what->chunks;
  for (int32_t r = 0; r < what->rank_count; ++r) {
    char way = what->ways[r];
    CHECK_EQUAL(seen[r].copies, way == 'f' ? what->chunks : 0);
    CHECK_EQUAL(seen[r].copied_bytes, way == 'f' ? what->sizes_bytes[0] : 0);
    CHECK(way == 'p' ? seen[r].packs >= 1 && seen[r].packs <= parts : seen[r].packs == 0);
    CHECK_EQUAL(seen[r].waits, way == 's' || way == 'h' ? 1 : 0);
    CHECK_EQUAL(seen[r].sums, 0);
    takes[what->devices[r]] += way == 'p';
    takes[0] += way == 'f';
    over_link |= way == 'p' || way == 's';
  }
  for (int32_t d = 0; d < DEVICES; ++d) CHECK_EQUAL(takes_of(made, d), takes[d]);
  CHECK_EQUAL(seen[MAX_RANKS].sums, what->chunks);
  CHECK_EQUAL(seen[MAX_RANKS].links, over_link ? what->chunks : 0);
}

static void test_ways(const peer_case *what, const case_dtype *type) {
  scene made = scene_open(what, type, false, false);
  const caller *one = &made.callers[0];
  memset(seen, 0, sizeof seen);
  memcpy(watched, one->streams, sizeof one->streams);
  watched[MAX_RANKS] = one->home;
  CHECK_OK(call(&made, one));
  check_ways(&made);
  memset(watched, 0, sizeof watched);
  sim_run(made.world);
  check_sums(&made, one);
  scene_close(&made);
}

static void run_nothing(void *unused) { (void)unused; }

/* Owners say that they write what was read, each right after the call on its own stream, and pools
 * fill what is given back: who waits too little is reported. In the end no pool has more than it
 * keeps in flight. */
static void test_rounds(const peer_case *what, const case_dtype *type, bool on_defaults) {
  scene made = scene_open(what, type, true, on_defaults);
  int64_t takes[DEVICES] = {0};
  for (int32_t round = 0; round < ROUNDS; ++round) {
    caller *one = &made.callers[round % CALLERS];
    CHECK_OK(call(&made, one));
    for (int32_t r = 0; r < what->rank_count; ++r) {
      for (int32_t k = 0; k < what->slot_count; ++k) {
        const fdp_view *gradient = &one->gradients[r][k].view;
        sim_work(made.devices[what->devices[r]], one->streams[r], "the owner's write", run_nothing,
                 NULL, NULL, 0, gradient, 1);
      }
    }
  }
  sim_run(made.world);
  for (int32_t i = 0; i < CALLERS; ++i) check_sums(&made, &made.callers[i]);
  for (int32_t r = 0; r < what->rank_count; ++r) {
    takes[what->ways[r] == 'f' ? 0 : what->devices[r]] += FDP_POOL_DEPTH;
  }
  for (int32_t d = 0; d < DEVICES; ++d) {
    takes[d] += 1; /* what pools fill from */
    CHECK(takes_of(&made, d) <= takes[d]);
  }
  scene_close(&made);
}

/* The n-th call of a device fails, for every n until none is left: the next call, of somebody else,
 * takes the scratch that was given back, and is right; so is the first caller's when it tries
 * again. */
static void test_failures(const peer_case *what, const case_dtype *type, bool on_defaults) {
  bool reached = true;
  int32_t failures = 0;
  for (int64_t nth = 1; reached; ++nth) {
    scene made = scene_open(what, type, true, on_defaults);
    for (int32_t i = 0; i < CALLERS; ++i) CHECK_OK(call(&made, &made.callers[i]));
    sim_run(made.world);
    sim_fail_call(made.world, nth);
    fdp_status status = call(&made, &made.callers[0]);
    reached = sim_call_failed(made.world);
    sim_fail_call(made.world, 0);
    CHECK_EQUAL(status != FDP_OK, reached);
    CHECK_OK(call(&made, &made.callers[1]));
    sim_run(made.world);
    check_sums(&made, &made.callers[1]);
    CHECK_OK(call(&made, &made.callers[0]));
    sim_run(made.world);
    check_sums(&made, &made.callers[0]);
    scene_close(&made);
    failures += reached;
  }
  CHECK(failures >= (on_defaults ? 1 : what->rank_count));
}

void test_peer_sum(void) {
  for (int32_t number = 0; number < CASES * DTYPES; ++number) {
    const peer_case *what = &cases[number / DTYPES];
    const case_dtype *type = type_of(number);
    check_case("case %d, %s", (int)(what - cases), type->name);
    test_ways(what, type);
    for (int32_t i = 0; i < 2; ++i) test_rounds(what, type, i == 1);
  }
  for (int32_t number = 0; number < CASES * 2; ++number) {
    check_case("case %d fails, default streams %d", number / 2, number % 2);
    test_failures(&cases[number / 2], type_of(number), number % 2 == 1);
  }
  check_case("%s", "");
}
