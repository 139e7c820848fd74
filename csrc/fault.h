/* Faults on demand, for tests: "fail the n-th call of this verb". One relaxed atomic load per point
 * when nothing is armed. Process-wide, any thread; the table is fixed. */
#ifndef FDP_FAULT_H
#define FDP_FAULT_H

#include <stdint.h>

#include "status.h"

typedef enum fdp_fault_point {
  FDP_FAULT_SCATTER,
  FDP_FAULT_GATHER,
  FDP_FAULT_BROADCAST,
  FDP_FAULT_REDUCE,
  FDP_FAULT_BUCKET_BROADCAST,
  FDP_FAULT_BUCKET_REDUCE,
  FDP_FAULT_MEMORY_TAKE,
  FDP_FAULT_POINT_COUNT
} fdp_fault_point;

/* The n-th call from now (1 = the next) fails once with FDP_FAULT_INJECTED; 0 disarms. */
void fdp_fault_arm(fdp_fault_point point, int64_t nth_call);
fdp_status fdp_fault_check(fdp_fault_point point);
const char *fdp_fault_name(fdp_fault_point point); /* "scatter", "bucket_reduce", ... */

#endif
