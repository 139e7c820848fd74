/* The inside of the simulated backend: sim.c (operations and their order), sim_policy.c (what runs
 * when), sim_memory.c (blocks, and who touched which bytes), sim_device.c (the table of a device),
 * sim_report.c, sim_threads.c. Longer than a header should be: one struct, the world, is what all
 * six share, and most of this is its parts. */
#ifndef FDP_TEST_SIM_INSIDE_H
#define FDP_TEST_SIM_INSIDE_H

#include "sim.h"

#define SIM_MAX_STREAMS 120
#define SIM_MAX_THREADS 8
#define SIM_CLOCKS (SIM_MAX_STREAMS + SIM_MAX_THREADS)
#define SIM_MAX_DEVICES 16
#define SIM_STACK_DEPTH 12
#define SIM_MAX_TURNS 256
#define SIM_MAX_AREAS 64
#define SIM_TURN_STREAMS 16

/* Of each stream and each host thread, how many of its steps came before. */
typedef struct sim_clock {
  int32_t at[SIM_CLOCKS];
} sim_clock;

/* Where something was enqueued. */
typedef struct sim_place {
  const char *what;
  const void *site;
  int32_t stack; /* index in the world's stacks, or -1 */
  const char *note;
  int32_t number;
} sim_place;

/* Somebody touched bytes of a block: step `step` of clock entry `actor`. */
typedef struct sim_access {
  const char *begin;
  const char *end;
  bool writes;
  int32_t actor;
  int32_t step;
  sim_place place;
} sim_access;

typedef struct sim_log {
  sim_access *accesses;
  int32_t count;
  int32_t capacity;
} sim_log;

typedef struct sim_block {
  char *begin;
  int64_t size_bytes;
  bool is_live;
  sim_log log;
} sim_block;

/* The memory of one device, or what is pinned. Blocks at ascending addresses, with gaps. */
typedef struct sim_arena {
  char *base;
  int64_t used_bytes;
  sim_block *blocks;
  int32_t count;
  int32_t capacity;
} sim_arena;

/* The last group of a set of communicators on a device. */
typedef struct sim_turn {
  int32_t device;
  const void *set;
  int32_t streams[SIM_TURN_STREAMS];
  int32_t steps[SIM_TURN_STREAMS];
  int32_t count;
  sim_clock clock; /* what it came after */
} sim_turn;

/* Memory from elsewhere that is said to be a device's. */
typedef struct sim_area {
  const char *begin;
  const char *end;
  int32_t device;
} sim_area;

typedef enum sim_kind { SIM_WORK, SIM_RECORD, SIM_WAIT } sim_kind;

typedef struct sim_operation {
  sim_kind kind;
  int32_t stream;
  bool has_run;
  int64_t record; /* of a wait: the operation that it waits for */
  int64_t next;   /* of the stream; -1: none yet */
  void (*run)(const struct sim_operation *operation);
  void (*user_run)(void *argument);
  void *target; /* of the work; the flat buffer of pack and unpack */
  const void *source;
  void *items; /* own copy of the argument array */
  int32_t count;
  int32_t device; /* index; -1: unknown */
  sim_place place;
  sim_clock clock;
} sim_operation;

typedef struct sim_backend {
  fdp_device base;
  sim *world;
  int32_t index;
  fdp_stream *standard[SIM_MAX_THREADS]; /* what NULL stands for: on a GPU the first, on the host
                                            one for each thread; made at first use */
  bool is_full; /* until memory is dropped */
  int32_t open_streams;
  int32_t open_events;
} sim_backend;

struct fdp_stream {
  sim *world;
  int32_t index;
  sim_backend *device; /* NULL: none in particular */
  bool is_closed;
  int64_t first; /* operation that has not run; -1: none */
  int64_t last;
  uint64_t priority;
  sim_clock clock;
};

struct fdp_event {
  sim_backend *device;
  int64_t record; /* -1: never recorded */
  sim_clock clock;
};

struct sim {
  uint64_t random;
  sim_policy policy;
  int32_t starved; /* stream or device */
  fdp_stream streams[SIM_MAX_STREAMS];
  int32_t stream_count;
  sim_clock threads[SIM_MAX_THREADS];
  sim_place notes[SIM_MAX_THREADS];
  int32_t thread; /* the one that runs */
  sim_clock allocator; /* what whoever takes memory comes after */
  sim_operation *operations;
  int64_t base; /* number of operations[0]; those before it are over for everybody */
  int64_t operation_count;
  int64_t operation_capacity;
  sim_backend *devices[SIM_MAX_DEVICES];
  int32_t device_count;
  bool are_hosts[SIM_MAX_DEVICES];
  bool reaches[SIM_MAX_DEVICES][SIM_MAX_DEVICES];
  bool forbids[SIM_MAX_DEVICES][SIM_MAX_DEVICES];
  sim_arena arenas[SIM_MAX_DEVICES + 1]; /* the last is pinned memory */
  sim_log foreign;                       /* memory that memory_take did not give */
  sim_area areas[SIM_MAX_AREAS];         /* of it */
  int32_t area_count;
  sim_turn turns[SIM_MAX_TURNS];
  int32_t turn_count;
  int32_t wait_count;
  int32_t left_out;
  int64_t call_count;
  int64_t failing_call; /* 0: none */
  bool has_failed;
  int64_t stalling_call; /* 0: none */
  int32_t stalled; /* device + 1; 0: none */
  int64_t lost_ms[SIM_MAX_THREADS];
  int32_t spared;
  void (*yield)(sim *world); /* lets another host thread run; NULL where there are none */
  int32_t race_count;
  char report[2000];
  bool explains;
  const void *(*stacks)[SIM_STACK_DEPTH];
  int32_t stack_count;
  int32_t stack_capacity;
  uint64_t trace_hash;
  void *trace_file;
};

extern const fdp_device_ops sim_gpu_ops;
extern const fdp_device_ops sim_host_ops;

/* sim.c. Every push is followed by a commit, which lets the scheduler run what it likes. */
sim_operation *sim_push(fdp_stream *stream, sim_kind kind, sim_place place);
void sim_commit(fdp_stream *stream);
void sim_clock_merge(sim_clock *clock, const sim_clock *seen);
bool sim_has_run(const sim *world, int64_t operation);
sim_operation *sim_operation_at(sim *world, int64_t number);
void sim_run_first(sim *world, fdp_stream *stream);
void sim_trace(sim *world, char kind, int64_t a, int64_t b, int64_t c);
void *sim_grow(void *array, size_t item_bytes, int64_t count, int64_t *capacity);

/* sim_policy.c */
uint64_t sim_random(sim *world);
bool sim_is_ready(sim *world, const fdp_stream *stream);
void sim_progress(sim *world);
/* Until that operation has run; false if a stalled device is in its way. */
bool sim_run_until(sim *world, int64_t operation);

/* sim_memory.c */
void *sim_memory_take(sim *world, int32_t arena, int64_t size_bytes);
void sim_memory_drop(sim *world, int32_t arena, void *address, sim_place place);
int32_t sim_memory_live_count(const sim *world, int32_t arena);
void sim_memory_close(sim *world);
void sim_memory_forget(sim *world);
/* The device whose memory it is, by index; -1: unknown, or pinned memory. */
int32_t sim_memory_owner(const sim *world, const void *address);
/* `actor`'s step with that clock touches those bytes; `device` < 0: the host, or unknown. */
void sim_touch(sim *world, int32_t device, int32_t actor, const sim_clock *clock,
               const sim_place *place, const void *begin, int64_t size_bytes, bool writes);
void sim_touch_operation(sim_operation *operation, fdp_stream *stream, const void *begin,
                         int64_t size_bytes, bool writes);
void sim_touch_view(sim_operation *operation, fdp_stream *stream, const fdp_view *view,
                    bool writes);
void sim_touch_strided(sim_operation *operation, fdp_stream *stream, const void *start,
                       int32_t ndim, const int64_t *shape, const int64_t *strides_bytes,
                       int64_t item_bytes, bool writes);

/* sim_report.c */
sim_place sim_place_of(sim *world, const char *what, const void *site);

#endif
