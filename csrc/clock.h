/* The clock that waits on the host go by: CLOCK_MONOTONIC, which a change of the date does not
 * move. Any thread, no streams. */
#ifndef FDP_CLOCK_H
#define FDP_CLOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

static inline int64_t fdp_clock_read_ns(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline int64_t fdp_clock_ns(void) { return fdp_clock_read_ns(CLOCK_MONOTONIC); }

/* At a fifth of the cost, and some milliseconds late. */
static inline int64_t fdp_clock_coarse_ns(void) {
  return fdp_clock_read_ns(CLOCK_MONOTONIC_COARSE);
}

static inline struct timespec fdp_clock_after_ms(int64_t milliseconds) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  time.tv_sec += (time_t)(milliseconds / 1000);
  time.tv_nsec += (long)(milliseconds % 1000) * 1000000;
  if (time.tv_nsec >= 1000000000) {
    time.tv_sec += 1;
    time.tv_nsec -= 1000000000;
  }
  return time;
}

/* A condition whose waits until `fdp_clock_after_ms` end by this clock. */
static inline void fdp_clock_cond_init(pthread_cond_t *cond) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(cond, &attributes);
  pthread_condattr_destroy(&attributes);
}

#endif
