/* The context: devices, adoption, the choice of a transport, the order of streams. */
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

static void sink(void *unused, fdp_log_level level, const char *message) {
  (void)unused;
  CHECK_EQUAL(level, FDP_LOG_DEBUG);
  strncpy(logged, message, sizeof logged - 1);
}

static void test_transport(void) {
  fdp_context *context = NULL;
  CHECK_OK(fdp_context_open(&context));
  const fdp_transport *transport = NULL;
  const fdp_device_id gpu = {FDP_DEVICE_CUDA, 1};
  const fdp_device_id others[] = {{FDP_DEVICE_CUDA, 1}, {FDP_DEVICE_CUDA, 0}};
  const fdp_device_id pinned[] = {{FDP_DEVICE_CUDA_PINNED, 0}};
  fdp_log_open(sink, NULL, FDP_LOG_DEBUG);
  CHECK_OK(fdp_context_transport(context, gpu, others, 1, &transport));
  CHECK_TEXT(transport->ops->name, "local");
  CHECK_TEXT(logged, "transport local");
  fdp_log_open(NULL, NULL, FDP_LOG_OFF);
  CHECK_OK(fdp_context_transport(context, host, pinned, 1, &transport));
#ifndef FDP_WITH_CUDA
  CHECK_FAILS(fdp_context_transport(context, gpu, others, 2, &transport), FDP_UNSUPPORTED,
              "no transport joins the devices (FASTDP_TRANSPORT=auto; local: cuda:1 and cuda:0 are "
              "different memories)");
  fdp_context_close(context);
  setenv("FASTDP_TRANSPORT", "peer", 1);
  CHECK_OK(fdp_context_open(&context));
  CHECK_FAILS(fdp_context_transport(context, gpu, others, 1, &transport), FDP_UNSUPPORTED,
              "no transport joins the devices (FASTDP_TRANSPORT=peer; local: FASTDP_TRANSPORT asks "
              "for another)");
  CHECK_OK(fdp_context_transport(context, host, pinned, 1, &transport)); /* only GPUs choose */
#endif
  fdp_context_close(context);
  setenv("FASTDP_TRANSPORT", "pigeon", 1);
  CHECK_FAILS(fdp_context_open(&context), FDP_INVALID_ARGUMENT,
              "FASTDP_TRANSPORT is \"pigeon\": must be one of auto|local|peer|nccl|host");
  unsetenv("FASTDP_TRANSPORT");
  setenv("FASTDP_TIMEOUT_MS", "soon", 1);
  CHECK_FAILS(fdp_context_open(&context), FDP_INVALID_ARGUMENT, NULL);
  unsetenv("FASTDP_TIMEOUT_MS");
}

void test_context(void) {
  test_devices();
  test_transport();
}
