/* What the tests of the verbs stand on: arrays of any layout with guard bytes, and a rig of ranks,
 * which exchange by each of the transports. */
#ifndef FDP_TEST_RIG_H
#define FDP_TEST_RIG_H

#include "../../csrc/context.h"

static const fdp_dtype float32 = {FDP_CODE_FLOAT, 32, 1};
static const fdp_dtype float64 = {FDP_CODE_FLOAT, 64, 1};
static const fdp_dtype int64 = {FDP_CODE_INT, 64, 1};
static const fdp_dtype int32 = {FDP_CODE_INT, 32, 1};
static const fdp_dtype uint8 = {FDP_CODE_UINT, 8, 1};
static const fdp_device_id host = {FDP_DEVICE_HOST, 0};

typedef enum rig_layout {
  RIG_ROWS,     /* row-major */
  RIG_COLUMNS,  /* column-major: dense */
  RIG_GAPS,     /* row-major with a gap after every element */
  RIG_NEGATIVE, /* every dimension backwards */
  RIG_SHIFTED,  /* row-major, starting one element off the alignment */
  RIG_EXPANDED, /* dimension 0 has stride 0: sources only */
  RIG_LAYOUT_COUNT
} rig_layout;

typedef struct rig_array {
  fdp_view view;
  unsigned char *block;
  int64_t block_bytes;
} rig_array;

rig_array rig_array_open(fdp_dtype dtype, int32_t ndim, const int64_t *shape, rig_layout layout,
                         fdp_device_id device);
void rig_array_close(rig_array *array);
/* The element with the row-major number `index`. */
void *rig_address(const fdp_view *view, int64_t index);
/* A number as an element of a dtype, and back; exact for small ones. */
void rig_store(fdp_dtype dtype, void *address, int64_t value);
int64_t rig_load(fdp_dtype dtype, const void *address);
/* Fills with values that are unique per rank and index as far as the dtype can tell. */
void rig_fill(const rig_array *array, int32_t rank);
int64_t rig_value(int32_t rank, int64_t index);
/* True if no byte outside the elements was written since rig_array_open. */
bool rig_guards_hold(const rig_array *array);

#define RIG_RANKS 8

typedef enum rig_means {
  RIG_AT_ONCE, /* all ranks are the one host, on its NULL stream */
  RIG_THREADS, /* each is a host device of its own, with a stream that is a thread */
  RIG_PEER,    /* the same, but they pass for GPUs, joined by this transport */
  RIG_NCCL,    /* over a library that stands for NCCL */
  RIG_HOST,
  RIG_MEANS_COUNT
} rig_means;

typedef struct rig {
  rig_means means;
  fdp_context *context;
  fdp_device_id ids[RIG_RANKS];
  fdp_device *devices[RIG_RANKS];
  fdp_stream *streams[RIG_RANKS]; /* all NULL if RIG_AT_ONCE */
} rig;

/* A context whose verbs are carried by that transport; NULL: as it is. */
fdp_context *rig_context_open(const char *transport);
void rig_open(rig *ranks, rig_means means);
void rig_close(rig *ranks);
/* Waits until all that is enqueued on every stream has run. */
void rig_finish(const rig *ranks);

#endif
