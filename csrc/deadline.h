/* How long a call of a verb waits for devices on the host, where somebody set a deadline for the
 * calling thread: a wrapper's `timeout_s`, around each of its calls of the core. It is one for all
 * waits of the call together, those that clean up after a failure too. Without one each wait lasts
 * as long as FASTDP_TIMEOUT_MS says, which whoever waits was opened with. A thread has its own; no
 * streams. */
#ifndef FDP_DEADLINE_H
#define FDP_DEADLINE_H

#include <stdint.h>

/* For the calling thread from now on; 0: none. Gives what was set before, for the caller to set
 * again. */
int64_t fdp_deadline_exchange(int64_t timeout_ms);
/* A verb begins: its time is counted from here. */
void fdp_deadline_start(void);
/* What is left for a wait of the calling thread's verb; `standard_ms` if it has no deadline. */
int64_t fdp_deadline_or(int64_t standard_ms);
/* A wait lasted until the deadline: the others of this verb only look. */
void fdp_deadline_pass(void);

#endif
