/* The flight recorder: what the core did last, one record for each call of a verb, in a ring of
 * fixed size, so that after an error or in the middle of a hang one can see how it came to it.
 * Process-wide and always on: it costs some tens of nanoseconds a call, no lock and no memory. Any
 * thread. Says what the host enqueued, not what a device has finished; a recorded step that CUDA
 * graphs replay calls no verb. No streams. */
#ifndef FDP_RECORDER_H
#define FDP_RECORDER_H

#include <stddef.h>
#include <stdint.h>

#include "counters.h"
#include "limits.h"
#include "status.h"
#include "view.h"

/* Enough for the text of all of them, terminating zero included. */
#define FDP_RECORDER_TEXT_BYTES (160 * (FDP_RECORDER_LENGTH + 1))

typedef struct fdp_record {
  int64_t number; /* counted from 1; not in order of their ends */
  fdp_verb verb;
  int32_t bucket; /* its number (bucket.h), or 0 */
  int32_t other_count; /* targets or sources */
  int64_t size_bytes;
  fdp_device_id device; /* where the one source or target lies */
  const void *stream;   /* of that; an address, for people */
  int64_t started_ns; /* of the monotonic clock, to a few milliseconds */
  bool is_running;    /* the call had not returned */
  fdp_status status;  /* else: what it returned; FDP_OK means that all was enqueued */
} fdp_record;

/* A call begins; gives the record's number for fdp_recorder_end. A record whose place is just being
 * written by a thread that fell a whole ring behind is dropped, which gives 0. */
int64_t fdp_recorder_begin(fdp_verb verb, int32_t bucket, int64_t size_bytes, fdp_device_id device,
                           const void *stream, int32_t other_count);
void fdp_recorder_end(int64_t number, fdp_status status);

/* The records that are there, oldest first, into `records`, which has room for
 * FDP_RECORDER_LENGTH. Returns their number. Records of calls that run meanwhile may be missing. */
int32_t fdp_recorder_read(fdp_record *records);
/* The same as text, one line each, the newest last. FDP_RECORDER_TEXT_BYTES are always enough; what
 * does not fit is cut. Returns `text`. Calls nothing that a signal handler may not. */
const char *fdp_recorder_text(char *text, size_t size_bytes);

/* From now on SIGUSR1 writes the text to the standard error, from whatever thread it strikes, also
 * when Python cannot run. FDP_UNSUPPORTED when somebody else handles the signal already. */
fdp_status fdp_recorder_on_signal(void);

#endif
