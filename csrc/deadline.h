/* How long the calling thread waits for devices, where somebody set a deadline of its own for it:
 * a wrapper's `timeout_s`, around each of its calls of the core. Else what FASTDP_TIMEOUT_MS says,
 * which whoever waits was opened with. One number for each thread; no streams. */
#ifndef FDP_DEADLINE_H
#define FDP_DEADLINE_H

#include <stdint.h>

/* For the waits of the calling thread from now on; 0: none of its own. Gives what was set before,
 * for the caller to set again. */
int64_t fdp_deadline_exchange(int64_t timeout_ms);
/* The calling thread's own, or `standard_ms`. */
int64_t fdp_deadline_or(int64_t standard_ms);

#endif
