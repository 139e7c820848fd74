/* What the simulation of training steps is made of: a run (one simulated world and the context in
 * it), its callers (host threads that train a model each) and their models. All choices come from
 * the world's seed. Longer than a header should be, by the bounds of all its arrays. */
#ifndef FDP_TEST_SIMULATE_H
#define FDP_TEST_SIMULATE_H

#include "../../csrc/bucket.h"
#include "rig.h"
#include "sim.h"

enum {
  MAX_DEVICES = 8,
  MAX_REPLICAS = 8,
  MAX_BUCKETS = 4,
  MAX_SLOTS = 4,
  MAX_CALLERS = 2,
  MAX_STEPS = 3, /* of a caller in a round */
  MAX_ELEMS = 40, /* of a parameter */
  MANY_ROWS = 48, /* of a replica: more than a kernel pulls (FDP_PEER_DIRECT_BYTES) */
  MAX_ROWS = MANY_ROWS * MAX_REPLICAS,
  STREAMS_EACH = 2, /* of a kind, on one device */
  DEADLINE_MS = 5000
};

typedef struct run run;

/* Memory as torch's allocator has it: what is freed is the next to be taken for its stream. */
typedef struct user_block {
  struct user_block *next;
  int32_t device;
  fdp_stream *stream;
  int64_t size_bytes;
  void *data;
  bool is_free;
} user_block;

typedef struct user_array {
  user_block *block; /* NULL: the array is unused */
  fdp_view view;
} user_array;

typedef struct model_bucket {
  fdp_dtype dtype;
  int32_t slot_count;
  fdp_bucket *plan;
  user_array parameters[MAX_SLOTS];
  int64_t expected[MAX_SLOTS][MAX_ELEMS];
} model_bucket;

/* Where home has its input or output: two of them are the host. */
typedef enum home_place { ON_DEVICE, ON_HOST_STREAM, AT_ONCE } home_place;

typedef struct caller {
  run *run;
  int32_t number;
  fdp_stream *host_stream;
  fdp_stream *streams[MAX_DEVICES][STREAMS_EACH][2]; /* compute and communication; NULL: not yet */
  /* Of a round: */
  int32_t step_count;
  int32_t replica_count;
  int32_t devices[MAX_REPLICAS]; /* of replicas; home is device 0 */
  fdp_stream *compute[MAX_REPLICAS + 1]; /* the last is home's; NULL: the device's default */
  fdp_stream *beside[MAX_REPLICAS + 1];
  home_place input;
  home_place output;
  model_bucket buckets[MAX_BUCKETS];
  int32_t bucket_count;
  struct step *late[MAX_STEPS]; /* a device that never finishes may have their memory */
  int32_t late_count;
  int64_t lost_ms; /* in vain, until the last verb ended */
} caller;

/* Memory that lasts until all that is enqueued has run. */
typedef struct kept {
  struct kept *next;
  _Alignas(64) char bytes[];
} kept;

struct run {
  uint64_t seed;
  sim *world;
  fdp_context *context;
  fdp_device *devices[MAX_DEVICES + 1]; /* the last is the host */
  int32_t device_count;
  bool has_nccl;
  bool is_refused; /* nothing more can be done in this world */
  int64_t armed_count; /* failures that were asked for */
  int64_t failure_count;
  bool stalls; /* steps have a deadline, as a wrapper's timeout_s is one */
  int64_t late_steps; /* those that the deadline ended */
  user_block *blocks;
  kept *kept;
  caller callers[MAX_CALLERS];
  int32_t caller_count;
  int64_t done_steps;
  int64_t failed_steps;
  int64_t several_steps; /* of the done ones, those on two devices or more */
};

/* simulate_memory.c */
void *run_keep(run *own, size_t size_bytes);
void run_forget(run *own);
user_array array_take(run *own, int32_t device, fdp_stream *stream, fdp_dtype dtype, int32_t ndim,
                      const int64_t *shape, rig_layout layout);
void array_free(user_array *array);
/* Fills it with NaNs, on a stream. */
void array_poison(run *own, const user_array *array, fdp_stream *stream);
/* What a verb wrote may be written by its owner next: this says so, and changes nothing. */
void run_claim(run *own, int32_t device, fdp_stream *stream, const fdp_view *view);
/* What follows on the compute streams comes after all that this thread has seen: what it frees may
 * go to the other caller, on a default stream that they share. */
void caller_tell(caller *own);
void run_drop_blocks(run *own);
/* What is enqueued on `then` from now on comes after what is enqueued on `first`. */
void run_order(run *own, int32_t device, fdp_stream *first, int32_t then_device, fdp_stream *then);
fdp_event *run_event(run *own, int32_t device, fdp_stream *stream);
void run_wait(run *own, int32_t device, fdp_stream *stream, fdp_event *event);
void run_event_close(run *own, int32_t device, fdp_event *event);

/* simulate_model.c: a round's model, its values, and what they should be. */
void model_open(caller *own);
/* Compares all parameters with what they should be. */
void model_check(caller *own);
void model_close(caller *own);
int64_t model_checksum(const model_bucket *bucket);
/* What replica `replica` adds to the gradient of element `index`. */
int64_t model_gradient(int64_t parameter, int64_t from_above, int32_t replica, int64_t index);
int64_t model_update(int64_t parameter, int64_t gradient);

/* simulate_heap.c: allocations of the program that were not freed yet. */
int64_t heap_live_count(void);

/* simulate_step.c */
void caller_train(void *argument);
/* No device is stalled any more, and all has run. */
void caller_free_late(caller *own);

#endif
