/* A set: the communicators of a list of devices (nccl_comms.h), connected, and their groups in
 * order with those of other sets. All calls into NCCL that may not come back have a deadline, and
 * so has every wait for the devices. Used by one thread at a time, and two sets never by two
 * threads at once: that is up to nccl_book.c. A set owns a stream, an event and a few bytes on each
 * of its devices, on which it tries out its connections; the devices are borrowed. */
#ifndef FDP_NCCL_SET_H
#define FDP_NCCL_SET_H

#include "nccl_comms.h"

typedef struct fdp_nccl_set fdp_nccl_set;

/* On failure there is no set, and nothing of it is left but what is stuck (FDP_TIMED_OUT). */
fdp_status fdp_nccl_set_open(const fdp_nccl *nccl, fdp_device *const *devices, int32_t count,
                             int64_t timeout_ms, fdp_nccl_set **set);
/* Nothing may be enqueued on its communicators any more; or, with `aborts`, what is gets lost. */
void fdp_nccl_set_close(fdp_nccl_set *set, bool aborts, int64_t timeout_ms);

/* A tiny exchange of every kind with `home` at the root, once for each home: NCCL connects at first
 * use, which can hang too. `before` as below. After a failure the set is to be closed with
 * `aborts`. */
fdp_status fdp_nccl_set_connect(fdp_nccl_set *set, const fdp_nccl_set *before, int32_t home,
                                int64_t timeout_ms);
/* What went wrong on the devices since: FDP_DEVICE_ERROR, and the set is to be closed with
 * `aborts`. */
fdp_status fdp_nccl_set_check(const fdp_nccl_set *set);
/* All acts in one group, after the last group of `before` (may be NULL). Reads and writes on the
 * acts' streams. `what` is for messages. If `*is_broken` comes out true, work may have been
 * enqueued in part and the set is to be closed with `aborts`. */
fdp_status fdp_nccl_set_run(fdp_nccl_set *set, const fdp_nccl_set *before, const char *what,
                            const fdp_nccl_act *acts, int32_t act_count, bool *is_broken);

#endif
