/* The transport over NCCL, with a library that stands for it: what it refuses, how it seats ranks,
 * what it sums and in which way. The verbs' products of cases and the search for races run over it
 * too, in their own files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/limits.h"
#include "../../csrc/reduce.h"
#include "check.h"
#include "fake_gpu.h"
#include "rig.h"

enum { LENGTH = 37 };

static const fake_nccl_table *fake;
static const fdp_device_id gpus[] = {{FDP_DEVICE_CUDA, 1}, {FDP_DEVICE_CUDA, 2},
                                     {FDP_DEVICE_CUDA, 3}, {FDP_DEVICE_CUDA, 4}};

static fdp_status ask(fdp_context *context, fdp_device_id home, const fdp_device_id *others,
                      int32_t other_count) {
  char reason[FDP_MESSAGE_BYTES];
  const char *name = NULL;
  fdp_status status = fdp_context_transport(context, NULL, home, others, other_count, &name, reason,
                                            sizeof reason);
  if (status == FDP_OK) CHECK_TEXT(name, "nccl");
  return status;
}

/* --- what is refused --- */

/* A pair that corrupts peer copies would do so for NCCL: unless that keeps off. */
static void test_bad_peer(void) {
  rig ranks;
  setenv("FASTDP_TEST_BAD_PEER", "1-2", 1);
  rig_open(&ranks, RIG_NCCL);
  unsetenv("FASTDP_TEST_BAD_PEER");
  CHECK_FAILS(ask(ranks.context, gpus[0], gpus, 2), FDP_UNSUPPORTED,
              "FASTDP_TRANSPORT=nccl does not join the devices: cuda:1 and cuda:2 failed the check "
              "of peer copies: 4 bytes copied by cuda:1 in memory of cuda:2 are wrong from byte 2 "
              "on");
  CHECK_EQUAL(ask(ranks.context, gpus[0], gpus, 3), FDP_UNSUPPORTED);
  CHECK_OK(ask(ranks.context, gpus[0], gpus + 2, 2));
  setenv("NCCL_P2P_DISABLE", "1", 1);
  CHECK_OK(ask(ranks.context, gpus[0], gpus, 2));
  unsetenv("NCCL_P2P_DISABLE");
  rig_close(&ranks);
}

static void check_refused(const char *name, const char *value, const fdp_device_id *others,
                          const char *message) {
  rig ranks;
  if (name) setenv(name, value, 1);
  rig_open(&ranks, RIG_NCCL);
  char text[FDP_MESSAGE_BYTES];
  snprintf(text, sizeof text, "FASTDP_TRANSPORT=nccl does not join the devices: %s", message);
  CHECK_FAILS(ask(ranks.context, gpus[0], others, 3), FDP_UNSUPPORTED, text);
  if (name) unsetenv(name);
  rig_close(&ranks);
}

static void test_refusals(void) {
  const fdp_device_id twice[] = {gpus[0], gpus[0], gpus[0]};
  const char *repeated = "NCCL_MULTI_RANK_GPU_ENABLE is set and a GPU is listed several times";
  char text[FDP_MESSAGE_BYTES];
  check_refused("CUDA_LAUNCH_BLOCKING", "1", gpus,
                "CUDA_LAUNCH_BLOCKING is set: one thread that launches for several GPUs, each "
                "launch waiting for its end, would wait for ever");
  check_refused("NCCL_COMM_BLOCKING", "0", gpus,
                "NCCL_COMM_BLOCKING is 0, must not be: communicators that do not block start a "
                "thread for each group");
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  snprintf(text, sizeof text, "%s: NCCL_NVLS_ENABLE must be 0 for that", repeated);
  check_refused(NULL, NULL, twice, text);
  fake->set_version(22809);
  snprintf(text, sizeof text, "%s, but NCCL is 2.28.9, must be 2.30 or newer for that (%.100s)",
           repeated, FAKE_NCCL_PATH);
  check_refused("NCCL_NVLS_ENABLE", "0", twice, text);
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  fake->set_version(21602);
  check_refused(NULL, NULL, gpus, "NCCL cannot be used: FASTDP_NCCL: is NCCL 2.16.2, must be 2.17 "
                "or newer");
  fake->set_version(2804);
  check_refused(NULL, NULL, gpus, "NCCL cannot be used: FASTDP_NCCL: is NCCL 2.8.4, must be 2.17 "
                "or newer");
}

/* The environment is read at the first use, as NCCL and CUDA do, and then no more: another thread
 * may be changing it. */
static void test_environment_read_once(void) {
  static const char *const settings[][2] = {{"CUDA_LAUNCH_BLOCKING", "1"},
                                            {"NCCL_COMM_BLOCKING", "0"},
                                            {"NCCL_MULTI_RANK_GPU_ENABLE", "1"}};
  const fdp_device_id twice[] = {gpus[0], gpus[1], gpus[1]};
  rig ranks;
  rig_open(&ranks, RIG_NCCL);
  CHECK_OK(ask(ranks.context, gpus[0], gpus, 2));
  for (int i = 0; i < 3; ++i) {
    setenv(settings[i][0], settings[i][1], 1);
    check_case("%s", settings[i][0]);
    CHECK_OK(ask(ranks.context, gpus[0], gpus, 2));
    CHECK_OK(ask(ranks.context, gpus[0], twice, 3));
    unsetenv(settings[i][0]);
  }
  check_case("%s", "");
  rig_close(&ranks);
}

/* What stands for a missing or a wrong library. */
static void test_library(void) {
  rig ranks;
  rig_open(&ranks, RIG_NCCL);
  setenv("FASTDP_NCCL", "/nowhere/libnccl.so.2", 1);
  CHECK_FAILS(ask(ranks.context, gpus[0], gpus, 2), FDP_UNSUPPORTED,
              "FASTDP_TRANSPORT=nccl does not join the devices: NCCL cannot be used: FASTDP_NCCL: "
              "/nowhere/libnccl.so.2: cannot open shared object file: No such file or directory");
  setenv("FASTDP_NCCL", FAKE_NCCL_PATH, 1);
  /* It is looked for once. */
  CHECK_EQUAL(ask(ranks.context, gpus[0], gpus, 2), FDP_UNSUPPORTED);
  rig_close(&ranks);
  rig_open(&ranks, RIG_NCCL);
  setenv("FASTDP_NCCL", "libm.so.6", 1);
  CHECK_FAILS(ask(ranks.context, gpus[0], gpus, 2), FDP_UNSUPPORTED,
              "FASTDP_TRANSPORT=nccl does not join the devices: NCCL cannot be used: FASTDP_NCCL: "
              "does not tell its version");
  setenv("FASTDP_NCCL", FAKE_NCCL_PATH, 1);
  rig_close(&ranks);
}

/* --- sums --- */

static int64_t addend(int32_t rank, int64_t index) { return (rank + 2) * (index % 7 + 1) % 31; }

/* Values whose sums over eight ranks are exact in every dtype; bools are 0 or 1. */
static void store_addend(fdp_dtype dtype, void *address, int64_t value) {
  if (dtype.code == FDP_CODE_COMPLEX) {
    fdp_dtype part = {FDP_CODE_FLOAT, (uint8_t)(dtype.bits / 2), 1};
    store_addend(part, address, value);
    store_addend(part, (char *)address + part.bits / 8, value + 1);
  } else if (dtype.code == FDP_CODE_BOOL) {
    *(unsigned char *)address = value % 5 == 0;
  } else if (dtype.code == FDP_CODE_BFLOAT || (dtype.code == FDP_CODE_FLOAT && dtype.bits == 16)) {
    float number = (float)value;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    int32_t exponent = (int32_t)(bits >> 23 & 0xFF) - 127 + 15;
    uint16_t half = (uint16_t)(exponent << 10 | (int32_t)(bits >> 13 & 0x3FF));
    if (value == 0) half = 0;
    if (dtype.code == FDP_CODE_BFLOAT) half = (uint16_t)(bits >> 16);
    memcpy(address, &half, sizeof half);
  } else {
    rig_store(dtype, address, value);
  }
}

static const fdp_dtype dtypes[] = {
    {FDP_CODE_FLOAT, 64, 1},   {FDP_CODE_FLOAT, 32, 1},   {FDP_CODE_FLOAT, 16, 1},
    {FDP_CODE_BFLOAT, 16, 1},  {FDP_CODE_COMPLEX, 128, 1}, {FDP_CODE_COMPLEX, 64, 1},
    {FDP_CODE_COMPLEX, 32, 1}, {FDP_CODE_INT, 64, 1},     {FDP_CODE_INT, 32, 1},
    {FDP_CODE_INT, 16, 1},     {FDP_CODE_INT, 8, 1},      {FDP_CODE_UINT, 64, 1},
    {FDP_CODE_UINT, 32, 1},    {FDP_CODE_UINT, 16, 1},    {FDP_CODE_UINT, 8, 1},
    {FDP_CODE_BOOL, 8, 1}};

static void fill_addends(const rig_array *array, int32_t rank) {
  for (int64_t i = 0; i < LENGTH; ++i) {
    store_addend(array->view.dtype, rig_address(&array->view, i), addend(rank, i));
  }
}

/* The sum of the sources of `places` is what ref.c makes of them. */
static void check_sum(rig *ranks, fdp_dtype dtype, int32_t home, const int32_t *places,
                      int32_t count) {
  rig_array sources[RIG_RANKS], target, wanted;
  fdp_view views[RIG_RANKS];
  fdp_stream *streams[RIG_RANKS];
  const void *addresses[RIG_RANKS];
  const int64_t shape[] = {LENGTH};
  size_t size_bytes = LENGTH * fdp_dtype_bytes(dtype);
  for (int32_t r = 0; r < count; ++r) {
    sources[r] = rig_array_open(dtype, 1, shape, RIG_ROWS, ranks->ids[places[r]]);
    fill_addends(&sources[r], r);
    views[r] = sources[r].view;
    streams[r] = ranks->streams[places[r]];
    addresses[r] = views[r].data;
  }
  target = rig_array_open(dtype, 1, shape, RIG_ROWS, ranks->ids[home]);
  wanted = rig_array_open(dtype, 1, shape, RIG_ROWS, host);
  fdp_sum sum = {wanted.view.data, addresses, count, LENGTH, dtype, false};
  CHECK_EQUAL(fdp_ref_sum(&sum, 1, NULL), 0);
  CHECK_OK(fdp_reduce(ranks->context, views, streams, count, &target.view, ranks->streams[home]));
  rig_finish(ranks);
  CHECK(memcmp(target.view.data, wanted.view.data, size_bytes) == 0);
  CHECK(rig_guards_hold(&target));
  for (int32_t r = 0; r < count; ++r) rig_array_close(&sources[r]);
  rig_array_close(&target);
  rig_array_close(&wanted);
}

static int reduces_since(const fake_nccl_counts *before) {
  return fake->read().reduces - before->reduces;
}

static void test_dtypes(void) {
  const int32_t places[] = {0, 1, 2};
  rig ranks;
  rig_open(&ranks, RIG_NCCL);
  CHECK_OK(ask(ranks.context, gpus[0], gpus, 3));
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; ++i) {
    fdp_dtype dtype = dtypes[i];
    bool is_ncclable = dtype.code != FDP_CODE_BOOL && (dtype.bits != 16 ||
                       dtype.code == FDP_CODE_FLOAT || dtype.code == FDP_CODE_BFLOAT);
    check_case("dtype %d %d", dtype.code, dtype.bits);
    fake_nccl_counts before = fake->read();
    check_sum(&ranks, dtype, 0, places, 3);
    CHECK_EQUAL(reduces_since(&before), is_ncclable ? 3 : 0);
  }
  rig_close(&ranks);
}

/* Lists of devices in which home contributes or not, and devices repeat; with and without several
 * ranks on a device. */
static void test_seats(void) {
  static const struct {
    int32_t home;
    int32_t count;
    int32_t places[4];
    int reduces[2]; /* ranks of NCCL that took part: one per device, or several */
    int ctas;       /* of each, if several share a device; 0: as NCCL likes */
  } lists[] = {
      {0, 2, {0, 1}, {2, 2}, 0},       {1, 2, {0, 1}, {2, 2}, 0},
      {0, 4, {3, 2, 1, 0}, {4, 4}, 0}, {0, 3, {0, 0, 1}, {2, 2}, 0}, /* uneven: shared */
      {1, 4, {0, 1, 0, 1}, {2, 4}, 8}, {2, 4, {2, 2, 2, 2}, {0, 4}, 4},
      {0, 1, {0}, {0, 0}, 0},          {0, 1, {3}, {0, 0}, 0},
      {0, 3, {1, 1, 2}, {0, 0}, 0},    {3, 4, {1, 3, 3, 1}, {2, 4}, 8},
      {0, 3, {1, 1, 0}, {2, 2}, 0},    {3, 4, {1, 3, 2, 2}, {3, 3}, 0},
  };
  for (int32_t many = 0; many < 2; ++many) {
    if (many) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    if (many) setenv("NCCL_NVLS_ENABLE", "0", 1);
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; ++i) {
      rig ranks;
      fdp_device_id others[4];
      rig_open(&ranks, RIG_NCCL);
      check_case("many %d list %zu", many, i);
      for (int32_t r = 0; r < lists[i].count; ++r) others[r] = gpus[lists[i].places[r]];
      CHECK_OK(ask(ranks.context, gpus[lists[i].home], others, lists[i].count));
      fake_nccl_counts before = fake->read();
      check_sum(&ranks, float32, lists[i].home, lists[i].places, lists[i].count);
      CHECK_EQUAL(reduces_since(&before), lists[i].reduces[many]);
      CHECK_EQUAL(before.least_ctas, many ? lists[i].ctas : 0);
      rig_close(&ranks);
    }
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    unsetenv("NCCL_NVLS_ENABLE");
  }
}

/* Fewer devices than communicators are there for: no others are made, and sums are made at home. */
static void test_subset(void) {
  const int32_t all[] = {0, 1, 2}, some[] = {0, 2}, more[] = {0, 1, 2, 3};
  rig ranks;
  rig_open(&ranks, RIG_NCCL);
  check_sum(&ranks, float32, 0, all, 3);
  CHECK_EQUAL(fake->read().made, 3);
  fake_nccl_counts before = fake->read();
  check_sum(&ranks, float32, 0, some, 2);
  CHECK_EQUAL(fake->read().made, 3);
  CHECK_EQUAL(reduces_since(&before), 0);
  CHECK_EQUAL(fake->read().sends - before.sends, 1);
  check_sum(&ranks, float32, 0, more, 4);
  CHECK_EQUAL(fake->read().made, 7);
  check_sum(&ranks, float32, 2, all, 3); /* connects for another home */
  CHECK_EQUAL(fake->read().made, 7);
  rig_close(&ranks);
}

/* A gradient may be the very slot that it is added up in, of whichever rank on home's device. */
static void test_in_place(void) {
  const int64_t shape[] = {LENGTH};
  const int32_t places[] = {0, 0, 1};
  for (int32_t many = 0; many < 2; ++many) {
    if (many) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    if (many) setenv("NCCL_NVLS_ENABLE", "0", 1);
    for (int32_t same = 0; same < 2; ++same) {
      rig ranks;
      rig_array sources[3];
      fdp_view views[3];
      fdp_stream *streams[3];
      rig_open(&ranks, RIG_NCCL);
      check_case("many %d same %d", many, same);
      for (int32_t r = 0; r < 3; ++r) {
        sources[r] = rig_array_open(int32, 1, shape, RIG_ROWS, ranks.ids[places[r]]);
        fill_addends(&sources[r], r);
        views[r] = sources[r].view;
        streams[r] = ranks.streams[places[r]];
      }
      /* Rank 1 has a stream of its own on the same device. */
      CHECK_OK(ranks.devices[0]->ops->stream_open(ranks.devices[0], &streams[1]));
      CHECK_OK(fdp_reduce(ranks.context, views, streams, 3, &views[same], streams[same]));
      rig_finish(&ranks);
      ranks.devices[0]->ops->stream_close(ranks.devices[0], streams[1]);
      for (int64_t i = 0; i < LENGTH; ++i) {
        CHECK_EQUAL(rig_load(int32, rig_address(&views[same], i)),
                    addend(0, i) + addend(1, i) + addend(2, i));
      }
      for (int32_t r = 0; r < 3; ++r) rig_array_close(&sources[r]);
      rig_close(&ranks);
    }
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    unsetenv("NCCL_NVLS_ENABLE");
  }
}

void test_nccl(void) {
  fake = fake_nccl_get();
  CHECK(fake != NULL);
  if (!fake) return;
  test_refusals();
  test_bad_peer();
  test_environment_read_once();
  test_library();
  test_dtypes();
  test_seats();
  test_subset();
  test_in_place();
}
