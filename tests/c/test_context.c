/* The context: devices, adoption, the choice of a transport, the order of streams. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/bucket.h"
#include "../../csrc/device_host.h"
#include "../../csrc/log.h"
#include "check.h"
#include "rig.h"

static void test_devices(void) {
  fdp_context *context = NULL;
  CHECK_OK(fdp_context_open(&context));
  fdp_device *device = NULL, *again = NULL;
  CHECK_OK(fdp_context_device(context, host, &device));
  CHECK_OK(fdp_context_device(context, (fdp_device_id){FDP_DEVICE_CUDA_PINNED, 2}, &again));
  CHECK(device == again);
  CHECK_TEXT(device->ops->name, "host");
  CHECK(fdp_context_pool(context, device) != NULL);
  CHECK_FAILS(fdp_context_device(context, (fdp_device_id){FDP_DEVICE_HOST, 3}, &again),
              FDP_INVALID_ARGUMENT, "device cpu:3: the host has ordinal 0 only");
  CHECK_FAILS(fdp_context_device(context, (fdp_device_id){10, 0}, &again), FDP_UNSUPPORTED,
              "device device(10,0): only the host and CUDA devices are supported");
#ifndef FDP_WITH_CUDA
  CHECK_FAILS(fdp_context_device(context, (fdp_device_id){FDP_DEVICE_CUDA, 1}, &again),
              FDP_UNSUPPORTED, "device cuda:1: this build has no CUDA backend");
#endif
  fdp_device_host_options options = {.ordinal = 3, .timeout_ms = 1000};
  fdp_device *adopted = NULL;
  CHECK_OK(fdp_device_host_open(&options, &adopted));
  CHECK_OK(fdp_context_adopt(context, adopted));
  CHECK_OK(fdp_context_device(context, (fdp_device_id){FDP_DEVICE_HOST, 3}, &again));
  CHECK(again == adopted);
  CHECK_OK(fdp_device_host_open(&options, &adopted));
  CHECK_FAILS(fdp_context_adopt(context, adopted), FDP_INVALID_ARGUMENT,
              "device cpu:3: is open already");
  for (options.ordinal = 4; options.ordinal < 66; ++options.ordinal) {
    CHECK_OK(fdp_device_host_open(&options, &adopted));
    CHECK_OK(fdp_context_adopt(context, adopted));
  }
  CHECK_OK(fdp_device_host_open(&options, &adopted));
  CHECK_FAILS(fdp_context_adopt(context, adopted), FDP_UNSUPPORTED,
              "context: more than 64 devices");
  fdp_context_close(context);
  fdp_context_close(NULL);
}

static void test_scratch(void) {
  fdp_context *context = NULL;
  fdp_scratch scratch[FDP_MAX_DEVICES];
  fdp_device *device = NULL;
  fdp_buffer *buffer = NULL;
  CHECK_OK(fdp_context_open(&context));
  CHECK(fdp_context_scratch(context, true, scratch) == 0);
  CHECK_OK(fdp_context_device(context, host, &device));
  fdp_pool *pool = fdp_context_pool(context, device);
  CHECK_OK(fdp_pool_take(pool, 5000, NULL, &buffer));
  int64_t size_bytes = buffer->size_bytes;
  CHECK(fdp_context_scratch(context, true, scratch) == 1);
  CHECK(fdp_device_equal(scratch[0].id, device->id));
  CHECK(scratch[0].device_bytes == size_bytes && scratch[0].pinned_bytes == 0);
  CHECK_OK(fdp_pool_give_many(pool, buffer, NULL, 0, FDP_OK));
  CHECK(fdp_context_scratch(context, false, scratch) == 1);
  CHECK(scratch[0].device_bytes == size_bytes);
  CHECK(fdp_context_scratch(context, true, scratch) == 1);
  CHECK(scratch[0].device_bytes == 0);
  fdp_context_close(context);
}

static char logged[FDP_MESSAGE_BYTES];
static fdp_log_level logged_level;

static void sink(void *unused, fdp_log_level level, const char *message) {
  (void)unused;
  logged_level = level;
  strncpy(logged, message, sizeof logged - 1);
}

/* A context with threads for GPUs, under the ordinals 0 and 1. */
static fdp_context *open_gpus(const char *transport) {
  fdp_context *context = rig_context_open(transport);
  fdp_device_host_options options = {.kind = FDP_DEVICE_CUDA, .timeout_ms = 20000};
  for (; options.ordinal < 2; ++options.ordinal) {
    fdp_device *device = NULL;
    CHECK_OK(fdp_device_host_open(&options, &device));
    CHECK_OK(fdp_context_adopt(context, device));
  }
  return context;
}

static const fdp_device_id gpus[] = {{FDP_DEVICE_CUDA, 0}, {FDP_DEVICE_CUDA, 1}};

/* `expected` is "name, since reason", or the message of a failure. */
static void check_choice(const char *standard, const char *wanted, fdp_device_id home,
                         const fdp_device_id *others, int32_t count, fdp_status status,
                         const char *expected) {
  char reason[FDP_MESSAGE_BYTES] = "", text[FDP_MESSAGE_BYTES + 32];
  const char *name = NULL;
  fdp_context *context = open_gpus(standard);
  fdp_status found = fdp_context_transport(context, wanted, home, others, count, &name, reason,
                                           sizeof reason);
  CHECK_EQUAL(found, status);
  if (found == FDP_OK) snprintf(text, sizeof text, "%s, since %s", name, reason);
  CHECK_TEXT(found == FDP_OK ? text : fdp_last_message(), expected);
  fdp_context_close(context);
}

static void check_reason(const char *standard, fdp_device_id home, const fdp_device_id *others,
                         int32_t count, fdp_status status, const char *expected) {
  check_choice(standard, NULL, home, others, count, status, expected);
}

/* One call's own choice goes before FASTDP_TRANSPORT, and is a choice on the host, too. */
static void test_demand(void) {
  const fdp_device_id pinned[] = {{FDP_DEVICE_CUDA_PINNED, 0}};
  const char *name = "as before";
  char wanted[] = "peer";
  check_choice("host", "peer", gpus[0], gpus, 2, FDP_OK, "peer, since transport asks for it");
  check_choice("host", "auto", gpus[0], gpus, 2, FDP_OK,
               "peer, since local: cuda:0 and cuda:1 are different memories");
  check_choice(NULL, "host", host, pinned, 1, FDP_OK, "host, since transport asks for it");
  check_choice(NULL, "peer", host, pinned, 1, FDP_UNSUPPORTED,
               "transport=peer does not join the devices: cpu:0 is no GPU");
  check_choice(NULL, "nccl", host, pinned, 1, FDP_UNSUPPORTED,
               "transport=nccl does not join the devices: cpu:0 is no GPU");
  check_choice("peer", "local", gpus[0], gpus, 2, FDP_UNSUPPORTED, "transport=local does not join "
               "the devices: cuda:0 and cuda:1 are different memories");
  CHECK_OK(fdp_context_transport_name(wanted, &name));
  CHECK_TEXT(name, "peer");
  CHECK(name != wanted);
  CHECK_FAILS(fdp_context_transport_name("pigeon", &name), FDP_INVALID_ARGUMENT,
              "transport is \"pigeon\": must be one of auto|local|peer|nccl|host");
  CHECK_TEXT(name, "peer");
}

/* Both verbs of a bucket keep to what it demands. */
static void test_bucket_demand(void) {
  static const int64_t shape[] = {5};
  fdp_context *context = open_gpus(NULL);
  rig_array source = rig_array_open(float32, 1, shape, RIG_ROWS, gpus[0]);
  rig_array flat = rig_array_open(float32, 1, shape, RIG_ROWS, gpus[1]);
  const fdp_view *gradients[] = {&source.view};
  fdp_bucket *bucket = NULL;
  CHECK_OK(fdp_bucket_open(&source.view, NULL, 1, &bucket));
  CHECK_FAILS(fdp_bucket_demand(bucket, ""), FDP_INVALID_ARGUMENT,
              "transport is \"\": must be one of auto|local|peer|nccl|host");
#define BROADCAST() \
  fdp_bucket_broadcast(context, bucket, &source.view, NULL, &flat.view, NULL, 1)
#define REDUCE() fdp_bucket_reduce(context, bucket, gradients, NULL, 1, &flat.view, NULL)
  CHECK_OK(BROADCAST());
  CHECK_OK(fdp_bucket_demand(bucket, "host"));
  CHECK_OK(BROADCAST());
  CHECK_OK(REDUCE());
  CHECK_OK(fdp_bucket_demand(bucket, "local"));
  CHECK_FAILS(BROADCAST(), FDP_UNSUPPORTED, "transport=local does not join the devices: cuda:0 and "
              "cuda:1 are different memories");
  CHECK_FAILS(REDUCE(), FDP_UNSUPPORTED, "transport=local does not join the devices: cuda:1 and "
              "cuda:0 are different memories");
  fdp_bucket_close(bucket);
  fdp_context_close(context);
  rig_array_close(&flat);
  rig_array_close(&source);
}

static void test_transport(void) {
  const fdp_device_id pinned[] = {{FDP_DEVICE_CUDA_PINNED, 0}};
  static const char *const first = "local, since it is the first that is tried";
  check_reason(NULL, gpus[1], gpus + 1, 1, FDP_OK, first);
  check_reason(NULL, host, pinned, 1, FDP_OK, first);
  check_reason("nccl", host, pinned, 1, FDP_OK, first); /* only GPUs choose */
  check_reason(NULL, gpus[0], gpus, 2, FDP_OK,
               "peer, since local: cuda:0 and cuda:1 are different memories");
  check_reason(NULL, host, gpus, 1, FDP_OK, "host, since local: cpu:0 and cuda:0 are different "
               "memories; peer: cpu:0 is no GPU; nccl: cpu:0 is no GPU");
  check_reason(NULL, gpus[0], &host, 1, FDP_OK, "host, since local: cuda:0 and cpu:0 are different "
               "memories; peer: cpu:0 is no GPU; nccl: cpu:0 is no GPU");
  check_reason("host", gpus[0], gpus, 1, FDP_OK, "host, since FASTDP_TRANSPORT asks for it");
  check_reason("peer", gpus[0], gpus, 1, FDP_OK, "peer, since FASTDP_TRANSPORT asks for it");
  check_reason("local", gpus[0], gpus, 2, FDP_UNSUPPORTED, "FASTDP_TRANSPORT=local does not join "
               "the devices: cuda:0 and cuda:1 are different memories");
  check_reason("nccl", gpus[0], gpus, 2, FDP_UNSUPPORTED,
               "FASTDP_TRANSPORT=nccl does not join the devices: NCCL cannot be used: FASTDP_NCCL: "
               "/none: cannot open shared object file: No such file or directory");
  fdp_context *context = open_gpus(NULL);
  fdp_party party;
  fdp_log_open(sink, NULL, FDP_LOG_DEBUG);
  CHECK_OK(fdp_context_party(context, NULL, gpus[0], NULL, gpus, NULL, 2, &party));
  CHECK_EQUAL(logged_level, FDP_LOG_DEBUG);
  CHECK_TEXT(logged, "transport peer, since local: cuda:0 and cuda:1 are different memories");
  CHECK_TEXT(party.transport->ops->name, "peer");
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
  fdp_context_close(context);
  setenv("FASTDP_TRANSPORT", "pigeon", 1);
  CHECK_FAILS(fdp_context_open(&context), FDP_INVALID_ARGUMENT,
              "FASTDP_TRANSPORT is \"pigeon\": must be one of auto|local|peer|nccl|host");
  unsetenv("FASTDP_TRANSPORT");
  setenv("FASTDP_TIMEOUT_MS", "soon", 1);
  CHECK_FAILS(fdp_context_open(&context), FDP_INVALID_ARGUMENT, NULL);
  unsetenv("FASTDP_TIMEOUT_MS");
}

/* A pair whose peer copies come out wrong is left alone, with one warning. */
static void test_bad_peer(void) {
  static const char *const found = "cuda:0 and cuda:1 failed the check of peer copies: 4 bytes "
      "copied by cuda:0 in memory of cuda:1 are wrong from byte 2 on";
  char reason[FDP_MESSAGE_BYTES] = "", wanted[FDP_MESSAGE_BYTES];
  const char *name = NULL;
  setenv("FASTDP_TEST_BAD_PEER", "1-0", 1);
  fdp_context *context = open_gpus(NULL);
  unsetenv("FASTDP_TEST_BAD_PEER");
  logged[0] = '\0';
  fdp_log_open(sink, NULL, FDP_LOG_WARNING);
  CHECK_OK(fdp_context_transport(context, NULL, gpus[0], gpus, 2, &name, reason, sizeof reason));
  CHECK_TEXT(name, "host");
  snprintf(wanted, sizeof wanted,
           "local: cuda:0 and cuda:1 are different memories; peer: %s; nccl: NCCL "
           "cannot be used: FASTDP_NCCL: /none: cannot open shared object file: No such file or "
           "directory", found);
  CHECK_TEXT(reason, wanted);
  CHECK_EQUAL(logged_level, FDP_LOG_WARNING);
  CHECK_TEXT(logged, found);
  logged[0] = '\0';
  CHECK_OK(fdp_context_transport(context, NULL, gpus[1], gpus, 2, &name, reason, sizeof reason));
  CHECK_TEXT(reason, "local: cuda:1 and cuda:0 are different memories; peer: cuda:0 and "
             "cuda:1 failed the check of peer copies: 4 bytes copied by cuda:0 in memory of cuda:1 "
             "are wrong from byte 2 on; nccl: NCCL cannot be used: FASTDP_NCCL: /none: cannot open "
             "shared object file: No such file or directory");
  CHECK_TEXT(logged, "");
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
  fdp_context_close(context);
  setenv("FASTDP_TEST_BAD_PEER", "0 and 1", 1);
  CHECK_FAILS(fdp_context_open(&context), FDP_INVALID_ARGUMENT,
              "FASTDP_TEST_BAD_PEER is \"0 and 1\": must be two GPUs' numbers, as 0-1");
  unsetenv("FASTDP_TEST_BAD_PEER");
}

static fdp_status reach_nothing(fdp_device *device, fdp_device *peer) {
  return fdp_fail(FDP_UNSUPPORTED, "cuda:%d: cannot reach the memory of cuda:%d",
                  (int)device->id.ordinal, (int)peer->id.ordinal);
}

/* GPUs without peer access: by NCCL if there is one, else through the host, and no warning. */
static void test_no_peers(void) {
  static fdp_device_ops apart;
  char reason[FDP_MESSAGE_BYTES] = "";
  const char *name = NULL;
  fdp_context *context = open_gpus(NULL);
  for (int32_t d = 0; d < 2; ++d) {
    fdp_device *device = NULL;
    CHECK_OK(fdp_context_device(context, gpus[d], &device));
    apart = *device->ops;
    apart.peer_reach = reach_nothing;
    device->ops = &apart;
  }
  logged[0] = '\0';
  fdp_log_open(sink, NULL, FDP_LOG_WARNING);
  CHECK_OK(fdp_context_transport(context, NULL, gpus[0], gpus, 2, &name, reason, sizeof reason));
  CHECK_TEXT(name, "host");
  CHECK_TEXT(reason, "local: cuda:0 and cuda:1 are different memories; peer: cuda:0: cannot reach "
             "the memory of cuda:1; nccl: NCCL cannot be used: FASTDP_NCCL: /none: cannot open "
             "shared object file: No such file or directory");
  CHECK_FAILS(fdp_context_transport(context, "peer", gpus[0], gpus, 2, &name, reason,
                                    sizeof reason), FDP_UNSUPPORTED,
              "transport=peer does not join the devices: cuda:0: cannot reach the memory of "
              "cuda:1");
  CHECK_TEXT(logged, "");
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
  fdp_context_close(context);
}

void test_context(void) {
  setenv("FASTDP_NCCL", "/none", 1); /* whatever this machine has */
  test_devices();
  test_scratch();
  test_transport();
  test_demand();
  test_bucket_demand();
  test_bad_peer();
  test_no_peers();
  unsetenv("FASTDP_NCCL");
}
