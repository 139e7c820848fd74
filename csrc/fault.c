#include "fault.h"

#include <assert.h>
#include <stdatomic.h>

/* Calls left until the one that fails; 0 when not armed. */
static _Atomic int64_t calls_left[FDP_FAULT_POINT_COUNT];

void fdp_fault_arm(fdp_fault_point point, int64_t nth_call) {
  assert((int)point >= 0 && point < FDP_FAULT_POINT_COUNT);
  atomic_store_explicit(&calls_left[point], nth_call > 0 ? nth_call : 0, memory_order_relaxed);
}

fdp_status fdp_fault_check(fdp_fault_point point) {
  int64_t left = atomic_load_explicit(&calls_left[point], memory_order_relaxed);
  while (left > 0) {
    if (atomic_compare_exchange_weak_explicit(&calls_left[point], &left, left - 1,
                                              memory_order_relaxed, memory_order_relaxed)) {
      if (left > 1) return FDP_OK;
      return fdp_fail(FDP_FAULT_INJECTED, "%s: this call was told to fail", fdp_fault_name(point));
    }
  }
  return FDP_OK;
}

const char *fdp_fault_name(fdp_fault_point point) {
  static const char *const names[FDP_FAULT_POINT_COUNT] = {
      [FDP_FAULT_SCATTER] = "scatter",
      [FDP_FAULT_GATHER] = "gather",
      [FDP_FAULT_BROADCAST] = "broadcast",
      [FDP_FAULT_REDUCE] = "reduce",
      [FDP_FAULT_BUCKET_BROADCAST] = "bucket_broadcast",
      [FDP_FAULT_BUCKET_REDUCE] = "bucket_reduce",
      [FDP_FAULT_MEMORY_TAKE] = "memory_take",
  };
  return (int)point >= 0 && point < FDP_FAULT_POINT_COUNT ? names[point] : "unknown";
}
