/* What tests give to host streams to run, and how they tell time. */
#ifndef FDP_TEST_HOST_WORK_H
#define FDP_TEST_HOST_WORK_H

#include <semaphore.h>

#include "../../csrc/clock.h"
#include "../../csrc/status.h"

static inline fdp_status wait_for_semaphore(void *semaphore) {
  while (sem_wait(semaphore) != 0) continue;
  return FDP_OK;
}

static inline fdp_status fail(void *unused) {
  (void)unused;
  return fdp_fail(FDP_DEVICE_ERROR, "on purpose");
}

static inline int64_t now_ms(void) { return fdp_clock_ns() / 1000000; }

static inline void sleep_ms(int64_t milliseconds) {
  struct timespec time = {milliseconds / 1000, (milliseconds % 1000) * 1000000};
  nanosleep(&time, NULL);
}

#endif
