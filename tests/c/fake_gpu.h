/* Devices of a test's backend made to pass for GPUs that NCCL joins: over the fake library, which
 * is told which device is current, and with an eye on what may not happen inside a group. */
#ifndef FDP_TEST_FAKE_GPU_H
#define FDP_TEST_FAKE_GPU_H

#include "fake_nccl.h"

/* The file of the library, for FASTDP_NCCL. */
#ifndef FAKE_NCCL_PATH
#error "the Makefile says where the library is"
#endif

/* The library's table, loaded at first use. */
const fake_nccl_table *fake_nccl_get(void);
/* After this the device is of a backend that only wrapped ones share. All devices of one test are
 * of one backend. */
void fake_gpu_wrap(fdp_device *device);
/* Checks that nothing was wrong and no communicator is left, and begins anew. After the context was
 * closed. */
void fake_gpu_finish(void);

#endif
