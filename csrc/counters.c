#include "counters.h"

#include <stdatomic.h>

static struct {
  _Atomic int64_t calls;
  _Atomic int64_t bytes;
  _Atomic int64_t chunks;
} counters[FDP_VERB_COUNT];

void fdp_counters_add(fdp_verb verb, int64_t bytes, int64_t chunks) {
  atomic_fetch_add_explicit(&counters[verb].calls, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&counters[verb].bytes, bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&counters[verb].chunks, chunks, memory_order_relaxed);
}

fdp_verb_counters fdp_counters_read(fdp_verb verb) {
  return (fdp_verb_counters){
      .calls = atomic_load_explicit(&counters[verb].calls, memory_order_relaxed),
      .bytes = atomic_load_explicit(&counters[verb].bytes, memory_order_relaxed),
      .chunks = atomic_load_explicit(&counters[verb].chunks, memory_order_relaxed),
  };
}

void fdp_counters_reset(void) {
  for (int verb = 0; verb < FDP_VERB_COUNT; ++verb) {
    atomic_store_explicit(&counters[verb].calls, 0, memory_order_relaxed);
    atomic_store_explicit(&counters[verb].bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&counters[verb].chunks, 0, memory_order_relaxed);
  }
}

const char *fdp_verb_name(fdp_verb verb) {
  static const char *const names[FDP_VERB_COUNT] = {
      [FDP_VERB_SCATTER] = "scatter",
      [FDP_VERB_GATHER] = "gather",
      [FDP_VERB_BROADCAST] = "broadcast",
      [FDP_VERB_REDUCE] = "reduce",
      [FDP_VERB_BUCKET_BROADCAST] = "bucket_broadcast",
      [FDP_VERB_BUCKET_REDUCE] = "bucket_reduce",
  };
  return (int)verb >= 0 && verb < FDP_VERB_COUNT ? names[verb] : "unknown";
}
