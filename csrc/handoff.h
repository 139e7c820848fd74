/* A slot through which one thread hands single items to one waiting thread: how a worker is given
 * its job and how the caller learns that it is done. A futex word and an item; no allocation, no
 * lock, no spinning beyond one look. One producer and one consumer at a time; any threads. No
 * streams. Items are opaque pointers; ownership goes with them. */
#ifndef FDP_HANDOFF_H
#define FDP_HANDOFF_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

typedef struct fdp_handoff {
  _Atomic uint32_t state; /* handoff.c: empty, empty with a sleeper, full, closed */
  void *item;
} fdp_handoff;

void fdp_handoff_init(fdp_handoff *handoff);
/* FDP_INVALID_ARGUMENT when an item is still in it, FDP_ABORTED when it was closed. */
fdp_status fdp_handoff_put(fdp_handoff *handoff, void *item);
/* The same in two steps, for a caller that holds a lock which the taker will want: the first never
 * enters the kernel, and says whether the second is needed to wake the taker. */
fdp_status fdp_handoff_put_nowake(fdp_handoff *handoff, void *item, bool *has_sleeper);
void fdp_handoff_wake(fdp_handoff *handoff);
/* Sleeps until there is an item. timeout_ms < 0 waits for ever. FDP_TIMED_OUT when the time is up,
 * FDP_ABORTED when the slot is empty and closed. A wait that a signal interrupts returns
 * FDP_TIMED_OUT early: the caller looks at its signals and calls again. */
fdp_status fdp_handoff_take(fdp_handoff *handoff, int64_t timeout_ms, void **item);
/* Wakes a waiting taker with FDP_ABORTED; an item already there can still be taken. */
void fdp_handoff_close(fdp_handoff *handoff);

#endif
