/* The runtime that fake_device.c tests against: what a test tells it to do, and what it saw. One
 * thread. */
#ifndef FDP_FAKE_RUNTIME_H
#define FDP_FAKE_RUNTIME_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

/* Two GPUs, of which one call at a time can be told what to answer. */
typedef struct fake_runtime {
  const char *failing; /* the function that fails with `code`; NULL for none */
  cudaError_t code;
  cudaError_t last_error;
  int driver_version, count, capability, current;
  enum cudaStreamCaptureMode mode;
  int busy_queries; /* how often a query answers "not ready" from now on */
  int queries, set_calls, peer_calls, can_access;
  bool had_wrong_device; /* something ran while device 1 was not current */
} fake_runtime;

extern fake_runtime fake;

void fake_reset(void);
/* From now on `function` fails, with `code`. */
void fake_fail(const char *function, cudaError_t code);

#endif
