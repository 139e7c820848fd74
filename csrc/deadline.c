#include "deadline.h"

#include <assert.h>

static _Thread_local int64_t own_ms;

int64_t fdp_deadline_exchange(int64_t timeout_ms) {
  assert(timeout_ms >= 0);
  int64_t before_ms = own_ms;
  own_ms = timeout_ms;
  return before_ms;
}

int64_t fdp_deadline_or(int64_t standard_ms) { return own_ms > 0 ? own_ms : standard_ms; }
