/* Communicators: one for each of a list of devices, made together, and the groups of acts that they
 * run. Calls into NCCL that may not come back run as jobs (nccl_job.h) with a deadline, on copies
 * of all that they reach. Used by one thread at a time; the devices are borrowed. What a group
 * does, it enqueues on its acts' streams; no other function touches a stream. */
#ifndef FDP_NCCL_COMMS_H
#define FDP_NCCL_COMMS_H

#include "nccl.h"
#include "nccl_seats.h"

typedef struct fdp_nccl_comms {
  const fdp_nccl *nccl;
  int32_t count;
  fdp_device *devices[FDP_NCCL_MAX_SEATS];
  fdp_nccl_comm *handles[FDP_NCCL_MAX_SEATS]; /* by seat */
} fdp_nccl_comms;

/* What the rank at `seat` does in a group. Broadcast and reduce are acts of every seat. Its stream
 * is of the seat's device, as is the memory; only the root of a reduce has a target. */
typedef enum fdp_nccl_verb {
  FDP_NCCL_BROADCAST,
  FDP_NCCL_REDUCE,
  FDP_NCCL_SEND,
  FDP_NCCL_RECV
} fdp_nccl_verb;

typedef struct fdp_nccl_act {
  fdp_nccl_verb verb;
  int32_t seat;
  int32_t peer; /* the root, or the other side */
  const void *source;
  void *target;
  int64_t count_elems;
  fdp_nccl_dtype dtype;
  fdp_stream *stream;
} fdp_nccl_act;

/* Fills `handles`; the rest is there. After a failure there are none, and nothing is left of them
 * but what is stuck (FDP_TIMED_OUT). Several ranks of one device get fewer channels each, as NCCL
 * may hang where a GPU has too few. */
fdp_status fdp_nccl_comms_make(fdp_nccl_comms *comms, int64_t timeout_ms);
/* Nothing may be enqueued on them any more; or, with `aborts`, what is gets lost. */
fdp_status fdp_nccl_comms_end(const fdp_nccl_comms *comms, bool aborts, int64_t timeout_ms);

/* All acts in one group. `what` is for messages. After a failure some may have been enqueued. */
fdp_status fdp_nccl_comms_run(const fdp_nccl_comms *comms, const char *what,
                              const fdp_nccl_act *acts, int32_t act_count);
/* The same as a job: for a group that connects, which can hang. */
fdp_status fdp_nccl_comms_run_within(const fdp_nccl_comms *comms, const char *what,
                                     const fdp_nccl_act *acts, int32_t act_count,
                                     int64_t timeout_ms);
/* What went wrong on the devices since: FDP_DEVICE_ERROR. */
fdp_status fdp_nccl_comms_check(const fdp_nccl_comms *comms);

#endif
