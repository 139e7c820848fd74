/* The inside of the simulated backend, for sim.c (the world: what runs when) and sim_device.c (the
 * table of a device: what is enqueued). */
#ifndef FDP_TEST_SIM_INSIDE_H
#define FDP_TEST_SIM_INSIDE_H

#include "sim.h"

#define SIM_MAX_STREAMS 32
#define SIM_MAX_OPERATIONS 4096

typedef struct sim_access {
  const char *begin;
  const char *end;
  bool writes;
} sim_access;

typedef enum sim_kind { SIM_WORK, SIM_RECORD, SIM_WAIT } sim_kind;

typedef struct sim_operation {
  sim_kind kind;
  int32_t stream;
  bool has_run;
  int32_t record; /* of a wait: the operation that it waits for */
  void (*run)(const struct sim_operation *operation);
  void *target; /* of the work; the flat buffer of pack and unpack */
  const void *source;
  int64_t size_bytes;
  void *items; /* own copy of the argument array */
  int32_t count;
  sim_access *accesses;
  int32_t access_count;
  int32_t access_capacity;
  int64_t enqueued[SIM_MAX_STREAMS]; /* the host's clock when it was enqueued */
  int64_t clock[SIM_MAX_STREAMS];    /* set when it has run */
} sim_operation;

struct fdp_stream {
  sim *world;
  int32_t index;
};

struct fdp_event {
  int32_t record; /* -1: never recorded */
};

typedef struct sim_backend {
  fdp_device base;
  sim *world;
} sim_backend;

struct sim {
  uint64_t random;
  fdp_stream streams[SIM_MAX_STREAMS];
  int32_t stream_count;
  fdp_stream *closed_streams[SIM_MAX_STREAMS];
  int32_t closed_count;
  int64_t clocks[SIM_MAX_STREAMS][SIM_MAX_STREAMS]; /* of each stream, as far as it has run */
  int64_t host_clock[SIM_MAX_STREAMS]; /* what the host has seen to be over */
  int32_t operation_count;
  int32_t first_waiting; /* all operations before it have run */
  int32_t wait_count;
  int32_t left_out;
  int32_t race_count;
  sim_operation operations[SIM_MAX_OPERATIONS];
};

extern const fdp_device_ops sim_ops;

sim_operation *sim_push(fdp_stream *stream, sim_kind kind);
/* The operation reads or writes all of a view. */
void sim_touch_view(sim_operation *operation, const fdp_view *view, bool writes);
/* Each entry becomes the later of the two. */
void sim_clock_merge(int64_t *clock, const int64_t *seen);

#endif
