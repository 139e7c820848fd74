/* One simulated world from its beginning to its end. */
#ifndef FDP_TEST_SIMULATE_WORLD_H
#define FDP_TEST_SIMULATE_WORLD_H

#include <stdio.h>

#include "simulate.h"

typedef struct world_totals {
  int64_t worlds;
  int64_t schedules;
  int64_t several;
  int64_t failures;
  int64_t policies[SIM_POLICY_COUNT];
  int64_t sweeps;
  int64_t late; /* steps that a device which never finishes ended */
} world_totals;

/* What one world came to. */
typedef struct world_outcome {
  uint64_t trace_hash;
  int64_t first_call; /* of the first round */
  int64_t call_count; /* after it */
  char report[2000]; /* empty: nothing was wrong */
} world_outcome;

/* `failing_call`: 0 for failures by chance; else of one round that call, and -1 for none. With
 * `stalls` a device never finishes from that call on, until the round is over. What was done is
 * added to `sums`. Writes its trace if there is a file for it. */
world_outcome world_play(uint64_t seed, bool explains, FILE *trace, int64_t failing_call,
                         bool stalls, world_totals *sums);
/* Of the one that runs, or ran last. */
uint64_t world_seed(void);

#endif
