/* What runs when. Whoever has to wait gets what it waits for; everything else is the policy's. */
#include <assert.h>

#include "sim_inside.h"

uint64_t sim_random(sim *world) { /* xorshift64* */
  world->random ^= world->random >> 12;
  world->random ^= world->random << 25;
  world->random ^= world->random >> 27;
  return world->random * UINT64_C(0x2545F4914F6CDD1D);
}

uint64_t sim_choose(sim *world, uint64_t bound) { return (sim_random(world) >> 16) % bound; }

const char *sim_policy_name(sim_policy policy) {
  static const char *const names[SIM_POLICY_COUNT] = {
      "late", "early", "random", "priority", "starve-stream", "starve-device"};
  return names[policy];
}

void sim_set_policy(sim *world, sim_policy policy, uint64_t seed) {
  world->random = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15) | 1;
  for (int32_t i = 0; i < 4; ++i) sim_random(world); /* small seeds are alike at first */
  world->policy = policy;
  int32_t count = policy == SIM_STARVE_DEVICE ? world->device_count : world->stream_count;
  world->starved = count > 0 ? (int32_t)sim_choose(world, (uint64_t)count) : 0;
  for (int32_t s = 0; s < SIM_MAX_STREAMS; ++s) world->streams[s].priority = sim_random(world);
}

bool sim_is_ready(sim *world, const fdp_stream *stream) {
  if (stream->first < 0) return false;
  const sim_operation *operation = sim_operation_at(world, stream->first);
  if (operation->device >= 0 && operation->device + 1 == world->stalled) return false;
  return operation->kind != SIM_WAIT || sim_has_run(world, operation->record);
}

static bool is_starved(const sim *world, const fdp_stream *stream) {
  if (world->policy == SIM_STARVE_STREAM) return stream->index == world->starved;
  if (world->policy != SIM_STARVE_DEVICE) return false;
  return stream->device && stream->device->index == world->starved;
}

/* A stream whose first operation may run. With `target`, only what has to run before it. */
static fdp_stream *pick(sim *world, const sim_operation *target) {
  fdp_stream *ready[SIM_MAX_STREAMS];
  uint64_t count = 0;
  for (int32_t s = 0; s < world->stream_count; ++s) {
    fdp_stream *stream = &world->streams[s];
    if (!sim_is_ready(world, stream) || (!target && is_starved(world, stream))) continue;
    const sim_operation *first = sim_operation_at(world, stream->first);
    if (target && first->clock.at[s] > target->clock.at[s]) continue;
    ready[count++] = stream;
  }
  if (count == 0) return NULL;
  if (world->policy != SIM_PRIORITY) return ready[sim_choose(world, count)];
  fdp_stream *best = ready[0];
  for (uint64_t i = 1; i < count; ++i) {
    if (ready[i]->priority > best->priority) best = ready[i];
  }
  if (sim_choose(world, 32) == 0) best->priority >>= 8; /* it comes after others from now on */
  return best;
}

void sim_progress(sim *world) {
  uint64_t left = 0;
  switch (world->policy) {
    case SIM_LATE: return;
    case SIM_RANDOM:
    case SIM_PRIORITY: left = sim_choose(world, 4); break;
    default: left = UINT64_MAX;
  }
  for (; left > 0; --left) {
    fdp_stream *stream = pick(world, NULL);
    if (!stream) return;
    sim_run_first(world, stream);
  }
}

bool sim_run_until(sim *world, int64_t operation) {
  while (!sim_has_run(world, operation)) {
    bool is_patient = world->policy == SIM_RANDOM || world->policy == SIM_PRIORITY;
    fdp_stream *stream = is_patient ? pick(world, NULL) : NULL;
    if (!stream) stream = pick(world, sim_operation_at(world, operation));
    if (!stream && world->stalled) return false;
    assert(stream); /* records come before their waits */
    sim_run_first(world, stream);
  }
  return true;
}
