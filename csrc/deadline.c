#include "deadline.h"

#include <assert.h>
#include <stdbool.h>

#include "clock.h"

static _Thread_local int64_t own_ms;
static _Thread_local int64_t start_ms;
static _Thread_local bool is_past;

static int64_t now_ms(void) { return fdp_clock_coarse_ns() / 1000000; }

int64_t fdp_deadline_exchange(int64_t timeout_ms) {
  assert(timeout_ms >= 0);
  int64_t before_ms = own_ms;
  own_ms = timeout_ms;
  fdp_deadline_start();
  return before_ms;
}

void fdp_deadline_start(void) {
  if (own_ms == 0) return;
  start_ms = now_ms();
  is_past = false;
}

int64_t fdp_deadline_or(int64_t standard_ms) {
  if (own_ms == 0) return standard_ms;
  int64_t left_ms = own_ms - (now_ms() - start_ms);
  return is_past || left_ms < 0 ? 0 : left_ms;
}

void fdp_deadline_pass(void) { is_past = true; }
