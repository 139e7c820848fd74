/* What the core did, per verb: calls, bytes written to targets, chunks (pieces handed to a
 * transport). Process-wide, relaxed atomics, any thread. Bytes are counted when a verb has
 * enqueued all of its work, so they equal the plan's bytes. */
#ifndef FDP_COUNTERS_H
#define FDP_COUNTERS_H

#include <stdint.h>

typedef enum fdp_verb {
  FDP_VERB_SCATTER,
  FDP_VERB_GATHER,
  FDP_VERB_BROADCAST,
  FDP_VERB_REDUCE,
  FDP_VERB_BUCKET_BROADCAST,
  FDP_VERB_BUCKET_REDUCE,
  FDP_VERB_COUNT
} fdp_verb;

typedef struct fdp_verb_counters {
  int64_t calls;
  int64_t bytes;
  int64_t chunks;
} fdp_verb_counters;

void fdp_counters_add(fdp_verb verb, int64_t bytes, int64_t chunks);
fdp_verb_counters fdp_counters_read(fdp_verb verb);
void fdp_counters_reset(void);
const char *fdp_verb_name(fdp_verb verb); /* "scatter", ..., "bucket_reduce" */

#endif
