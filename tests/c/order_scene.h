/* Scenes on simulated GPUs, for the tests of the transports between them: two callers, who make a
 * verb over the same devices in turn, each between work of its owners on their own streams. Buckets
 * are large enough for shards and chunks (the Makefile shrinks those limits). */
#ifndef FDP_TEST_ORDER_SCENE_H
#define FDP_TEST_ORDER_SCENE_H

#include "../../csrc/bucket.h"
#include "rig.h"
#include "sim.h"

enum {
  MAX_RANKS = 7,
  SLOTS = 3,
  ROWS = 84, /* divides by every number of ranks */
  CALLERS = 2,
  ROUNDS = 6, /* more than buffers that a pool keeps in flight */
  ORDER_MAPS = 8
};

/* Which device each rank lies on; home is device 0. */
typedef struct order_map {
  int32_t rank_count;
  int32_t devices[MAX_RANKS];
} order_map;

extern const order_map order_maps[ORDER_MAPS];

typedef enum order_verb {
  SCATTER,
  GATHER,
  BROADCAST,
  REDUCE,
  BUCKET_BROADCAST,
  BUCKET_REDUCE,
  LONE_BROADCAST, /* a bucket of one tensor */
  LONE_REDUCE,
  VERB_COUNT
} order_verb;

/* Home has the source. */
bool order_verb_from_home(order_verb verb);

typedef enum stream_use {
  OWN_STREAMS,   /* each rank and home has one of its own */
  DEFAULT_FIRST, /* but those of the first caller, who has the devices' default streams */
  ANY_STREAMS,
  STREAM_USES
} stream_use;

/* Home has tensors `whole`, each rank has `parts`; of a bucket verb one side is a flat. A stream
 * may be NULL. */
typedef struct order_caller {
  fdp_stream *home;
  fdp_stream *streams[MAX_RANKS];
  rig_array whole[SLOTS];
  rig_array parts[MAX_RANKS][SLOTS];
} order_caller;

/* Two callers take turns, so that they share scratch and lanes, and default streams if any. */
typedef struct order_scene {
  sim *world;
  fdp_context *context;
  fdp_device *devices[MAX_RANKS];
  const order_map *where;
  fdp_bucket *bucket;
  order_caller callers[CALLERS];
  int32_t slot_count; /* of the bucket */
  int32_t whole_count;
  int32_t part_count;
  int32_t first_wait; /* the pairs' checks made those before */
} order_scene;

order_scene order_scene_open(order_verb verb, const char *transport, const order_map *where,
                         rig_layout layout, stream_use use);
/* All has run. */
void order_scene_close(order_scene *made);
fdp_status order_scene_call(const order_scene *made, const order_caller *one, order_verb verb);
/* The owners fill a caller's tensors with bytes `value`, on their streams. */
void order_scene_write_whole(const order_scene *made, const order_caller *one, unsigned char value);
void order_scene_write_parts(const order_scene *made, const order_caller *one, unsigned char value);
/* Rounds of calls: the owners write the sources before a call and spoil them after it, and read the
 * targets, or spoil them too. Runs all. */
void order_scene_play(order_scene *made, order_verb verb, bool spoils_targets);
/* Checks the targets of the last round, if they were not spoiled. */
void order_scene_check(const order_scene *made, order_verb verb);

#endif
