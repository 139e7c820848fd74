#include "handoff.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"

/* The state word. CLOSED is a bit of its own, so that an item already there can still be taken. A
 * taker marks that it sleeps, so that a put without a sleeper makes no system call. */
enum { EMPTY = 0, SLEEPER = 1, FULL = 2, CLOSED = 4 };

_Static_assert(sizeof(_Atomic uint32_t) == 4, "the kernel waits on a word of 32 bits");

static long futex(_Atomic uint32_t *word, int operation, uint32_t value,
                  const struct timespec *deadline) {
  return syscall(SYS_futex, word, operation, value, deadline, NULL, FUTEX_BITSET_MATCH_ANY);
}

void fdp_handoff_wake(fdp_handoff *handoff) {
  futex(&handoff->state, FUTEX_WAKE_PRIVATE, 1, NULL);
}

void fdp_handoff_init(fdp_handoff *handoff) {
  atomic_init(&handoff->state, EMPTY);
  handoff->item = NULL;
}

fdp_status fdp_handoff_put_nowake(fdp_handoff *handoff, void *item, bool *has_sleeper) {
  uint32_t state = atomic_load_explicit(&handoff->state, memory_order_acquire);
  if (state & CLOSED) return fdp_fail(FDP_ABORTED, "handoff: put, but it was closed");
  if (state & FULL) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "handoff: put, but an item is still in it");
  }
  /* Nobody reads the item before FULL is set. */
  handoff->item = item;
  do {
    if (state & CLOSED) return fdp_fail(FDP_ABORTED, "handoff: put, but it was closed");
  } while (!atomic_compare_exchange_weak_explicit(&handoff->state, &state, FULL,
                                                  memory_order_acq_rel, memory_order_acquire));
  *has_sleeper = (state & SLEEPER) != 0;
  return FDP_OK;
}

fdp_status fdp_handoff_put(fdp_handoff *handoff, void *item) {
  bool has_sleeper = false;
  fdp_status status = fdp_handoff_put_nowake(handoff, item, &has_sleeper);
  if (has_sleeper) fdp_handoff_wake(handoff);
  return status;
}

/* Takes back the mark of a taker that sleeps no more. */
static void forget_sleeper(fdp_handoff *handoff) {
  atomic_fetch_and_explicit(&handoff->state, ~(uint32_t)SLEEPER, memory_order_relaxed);
}

fdp_status fdp_handoff_take(fdp_handoff *handoff, int64_t timeout_ms, void **item) {
  struct timespec deadline = {0};
  if (timeout_ms >= 0) deadline = fdp_clock_after_ms(timeout_ms);
  uint32_t state = atomic_load_explicit(&handoff->state, memory_order_acquire);
  bool may_sleep = true;
  for (;;) {
    if (state & FULL) {
      *item = handoff->item;
      atomic_fetch_and_explicit(&handoff->state, (uint32_t)CLOSED, memory_order_release);
      return FDP_OK;
    }
    if (state & CLOSED) return fdp_fail(FDP_ABORTED, "handoff: take, but it was closed");
    if (!may_sleep) {
      forget_sleeper(handoff);
      return fdp_fail(FDP_TIMED_OUT, "handoff: no item within %" PRId64 " ms", timeout_ms);
    }
    if (!(state & SLEEPER) &&
        !atomic_compare_exchange_weak_explicit(&handoff->state, &state, SLEEPER,
                                               memory_order_acquire, memory_order_acquire)) {
      continue;
    }
    long woken = futex(&handoff->state, FUTEX_WAIT_BITSET_PRIVATE, SLEEPER,
                       timeout_ms < 0 ? NULL : &deadline);
    if (woken != 0 && (errno == ETIMEDOUT || errno == EINTR)) may_sleep = false;
    state = atomic_load_explicit(&handoff->state, memory_order_acquire);
  }
}

void fdp_handoff_close(fdp_handoff *handoff) {
  uint32_t state = atomic_fetch_or_explicit(&handoff->state, CLOSED, memory_order_acq_rel);
  if (state & SLEEPER) fdp_handoff_wake(handoff);
}
