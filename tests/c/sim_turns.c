/* Turns: groups of two sets of communicators that share a device have to be ordered there, as their
 * kernels wait for each other's devices and could fill them. A group joins all streams that it has
 * on a device, so whoever comes after one of them comes after all; and it comes after the last
 * group of its set, by NCCL's own order. */
#include "sim_inside.h"

static sim_turn *find_turn(sim *world, int32_t device, const void *set) {
  for (int32_t i = 0; i < world->turn_count; ++i) {
    sim_turn *turn = &world->turns[i];
    if (turn->device == device && turn->set == set) return turn;
  }
  return NULL;
}

static const fdp_stream *stream_of(fdp_device *device, const fdp_stream *stream) {
  return stream ? stream : sim_default_stream(device);
}

/* What a group on these streams comes after. */
static sim_clock clock_of(sim *world, fdp_device *device, fdp_stream *const *streams,
                          int32_t count, const sim_turn *last) {
  sim_clock clock = world->threads[world->thread];
  for (int32_t i = 0; i < count; ++i) {
    sim_clock_merge(&clock, &stream_of(device, streams[i])->clock);
  }
  if (last) sim_clock_merge(&clock, &last->clock);
  return clock;
}

void sim_turn_begin(sim *world, fdp_device *device, fdp_stream *const *streams, int32_t count,
                    const void *set) {
  int32_t index = ((sim_backend *)device)->index;
  sim_clock clock = clock_of(world, device, streams, count, find_turn(world, index, set));
  for (int32_t i = 0; i < world->turn_count; ++i) {
    const sim_turn *turn = &world->turns[i];
    if (turn->device != index || turn->set == set) continue;
    bool is_ordered = false;
    for (int32_t k = 0; k < turn->count; ++k) {
      if (clock.at[turn->streams[k]] >= turn->steps[k]) is_ordered = true;
    }
    if (is_ordered) continue;
    sim_report(world, "two sets of communicators work on device %d without an order", index);
    return;
  }
}

/* The last one of a set stands for those before it. No streams: the set has ended there. */
void sim_turn_end(sim *world, fdp_device *device, fdp_stream *const *streams, int32_t count,
                  const void *set) {
  int32_t index = ((sim_backend *)device)->index;
  sim_turn *turn = find_turn(world, index, set);
  if (count == 0) {
    if (turn) *turn = world->turns[--world->turn_count];
    return;
  }
  if (!turn && world->turn_count == SIM_MAX_TURNS) {
    sim_report(world, "more than %d turns", SIM_MAX_TURNS);
    return;
  }
  sim_clock clock = clock_of(world, device, streams, count, turn);
  if (!turn) turn = &world->turns[world->turn_count++];
  *turn = (sim_turn){.device = index, .set = set, .clock = clock};
  turn->count = count < SIM_TURN_STREAMS ? count : SIM_TURN_STREAMS;
  for (int32_t i = 0; i < turn->count; ++i) {
    const fdp_stream *stream = stream_of(device, streams[i]);
    turn->streams[i] = stream->index;
    turn->steps[i] = stream->clock.at[stream->index];
  }
}
