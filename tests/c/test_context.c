/* The context: devices, adoption, the choice of a transport, the order of streams. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/context.h"
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

static char logged[FDP_MESSAGE_BYTES];
static fdp_log_level logged_level;

static void sink(void *unused, fdp_log_level level, const char *message) {
  (void)unused;
  logged_level = level;
  strncpy(logged, message, sizeof logged - 1);
}

/* A context with threads for GPUs, under the ordinals 0 and 1. */
static fdp_context *open_gpus(const char *transport) {
  fdp_context *context = NULL;
  if (transport) setenv("FASTDP_TRANSPORT", transport, 1);
  CHECK_OK(fdp_context_open(&context));
  unsetenv("FASTDP_TRANSPORT");
  fdp_device_host_options options = {.kind = FDP_DEVICE_CUDA, .timeout_ms = 20000};
  for (; options.ordinal < 2; ++options.ordinal) {
    fdp_device *device = NULL;
    CHECK_OK(fdp_device_host_open(&options, &device));
    CHECK_OK(fdp_context_adopt(context, device));
  }
  return context;
}

static const fdp_device_id gpus[] = {{FDP_DEVICE_CUDA, 0}, {FDP_DEVICE_CUDA, 1}};

static void check_reason(const char *forced, fdp_device_id home, const fdp_device_id *others,
                         int32_t count, fdp_status status, const char *wanted) {
  char text[FDP_MESSAGE_BYTES] = "";
  fdp_context *context = open_gpus(forced);
  fdp_status found =
      fdp_context_transport_reason(context, home, others, count, text, sizeof text);
  CHECK_EQUAL(found, status);
  CHECK_TEXT(found == FDP_OK ? text : fdp_last_message(), wanted);
  fdp_context_close(context);
}

static void test_transport(void) {
  const fdp_device_id pinned[] = {{FDP_DEVICE_CUDA_PINNED, 0}};
  check_reason(NULL, gpus[1], gpus + 1, 1, FDP_OK, "local");
  check_reason(NULL, host, pinned, 1, FDP_OK, "local");
  check_reason("nccl", host, pinned, 1, FDP_OK, "local"); /* only GPUs choose */
  check_reason(NULL, gpus[0], gpus, 2, FDP_OK,
               "peer, since local: cuda:0 and cuda:1 are different memories");
  check_reason(NULL, host, gpus, 1, FDP_OK, "host, since local: cpu:0 and cuda:0 are different "
               "memories; peer: cpu:0 is no GPU; nccl: cpu:0 is no GPU");
  check_reason(NULL, gpus[0], &host, 1, FDP_OK, "host, since local: cuda:0 and cpu:0 are different "
               "memories; peer: cpu:0 is no GPU; nccl: cpu:0 is no GPU");
  check_reason("host", gpus[0], gpus, 1, FDP_OK, "host, as FASTDP_TRANSPORT says");
  check_reason("peer", gpus[0], gpus, 1, FDP_OK, "peer, as FASTDP_TRANSPORT says");
  check_reason("local", gpus[0], gpus, 2, FDP_UNSUPPORTED, "FASTDP_TRANSPORT=local does not join "
               "the devices: cuda:0 and cuda:1 are different memories");
  check_reason("nccl", gpus[0], gpus, 2, FDP_UNSUPPORTED,
               "FASTDP_TRANSPORT=nccl does not join the devices: NCCL cannot be used: FASTDP_NCCL: "
               "/none: cannot open shared object file: No such file or directory");
  fdp_context *context = open_gpus(NULL);
  fdp_party party;
  fdp_log_open(sink, NULL, FDP_LOG_DEBUG);
  CHECK_OK(fdp_context_party(context, gpus[0], NULL, gpus, NULL, 2, &party));
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
  char text[FDP_MESSAGE_BYTES] = "", wanted[FDP_MESSAGE_BYTES];
  setenv("FASTDP_TEST_BAD_PEER", "1-0", 1);
  fdp_context *context = open_gpus(NULL);
  unsetenv("FASTDP_TEST_BAD_PEER");
  logged[0] = '\0';
  fdp_log_open(sink, NULL, FDP_LOG_WARNING);
  CHECK_OK(fdp_context_transport_reason(context, gpus[0], gpus, 2, text, sizeof text));
  snprintf(wanted, sizeof wanted,
           "host, since local: cuda:0 and cuda:1 are different memories; peer: %s; nccl: NCCL "
           "cannot be used: FASTDP_NCCL: /none: cannot open shared object file: No such file or "
           "directory", found);
  CHECK_TEXT(text, wanted);
  CHECK_EQUAL(logged_level, FDP_LOG_WARNING);
  CHECK_TEXT(logged, found);
  logged[0] = '\0';
  CHECK_OK(fdp_context_transport_reason(context, gpus[1], gpus, 2, text, sizeof text));
  CHECK_TEXT(text, "host, since local: cuda:1 and cuda:0 are different memories; peer: cuda:0 and "
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

void test_context(void) {
  setenv("FASTDP_NCCL", "/none", 1); /* whatever this machine has */
  test_devices();
  test_transport();
  test_bad_peer();
  unsetenv("FASTDP_NCCL");
}
