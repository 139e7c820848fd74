/* The CUDA build where there is no driver, or one too old: the real runtime over a libcuda.so.1 of
 * our own (old_driver.c) or none. `make -f gpu.mk refusals` builds and runs it: with the argument
 * "old" under that library, with "none" where there is none.
 *
 * Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/context.h"
#include "alone.h"

int main(int argument_count, char **arguments) {
  static const fdp_device_id gpus[] = {{FDP_DEVICE_CUDA, 0}, {FDP_DEVICE_CUDA, 1}};
  static const fdp_device_id host = {FDP_DEVICE_HOST, 0};
  bool is_old = argument_count > 1 && strcmp(arguments[1], "old") == 0;
  char expected[200], reason[FDP_MESSAGE_BYTES];
  const char *name = NULL;
  fdp_context *context = NULL;
  int needed = CUDART_VERSION / 1000;
  if (is_old) {
    snprintf(expected, sizeof expected, "cuda:0: the NVIDIA driver is too old: this build needs "
             "one for CUDA %d.0 or newer, found one for CUDA 11.4", needed);
  } else {
    snprintf(expected, sizeof expected, "cuda:0: no NVIDIA driver found; this build needs one for "
             "CUDA %d.0 or newer", needed);
  }
  CHECK(fdp_context_open(&context) == FDP_OK);
  for (int i = 0; i < 2; i++) { /* the same answer again, and the host works on */
    CHECK(fdp_context_transport(context, NULL, gpus[0], gpus + 1, 1, &name, reason,
                                sizeof reason) == FDP_UNSUPPORTED);
    CHECK(strcmp(fdp_last_message(), expected) == 0);
    CHECK(fdp_context_transport(context, NULL, host, &host, 1, &name, reason, sizeof reason) ==
          FDP_OK);
    CHECK(strcmp(name, "local") == 0);
  }
  fdp_context_close(context);
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
