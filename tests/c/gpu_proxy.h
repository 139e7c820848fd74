/* A CUDA device under another number, for tests: several that stand for one GPU are different
 * devices to the core, so that all that goes on between GPUs runs where there is one. */
#ifndef FDP_TEST_GPU_PROXY_H
#define FDP_TEST_GPU_PROXY_H

#include "../../csrc/device.h"

/* For a context to adopt under the id cuda:`number`. */
fdp_status gpu_proxy_open(int32_t number, int32_t ordinal, fdp_device **device);

#endif
