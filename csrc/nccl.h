/* What fastdp uses of NCCL, declared by itself: NCCL is found when the program runs, so one build
 * works with every NCCL from 2.17 on, and no header of NCCL or CUDA is needed. Handles are opaque;
 * the numbers and layouts below are NCCL's and never change. Only nccl_*.c and transport_nccl*.c
 * include this. No state, no streams. */
#ifndef FDP_NCCL_H
#define FDP_NCCL_H

#include <assert.h>
#include <limits.h>
#include <stddef.h>

/* major * 10000 + minor * 100 + patch */
#define FDP_NCCL_OLDEST 21700
#define FDP_NCCL_MULTI_RANK 23000 /* several ranks on one GPU */

typedef struct fdp_nccl_comm fdp_nccl_comm; /* ncclComm_t points to it */

typedef struct fdp_nccl_id { /* ncclUniqueId: passed by value */
  char internal[128];
} fdp_nccl_id;

typedef enum fdp_nccl_result {
  FDP_NCCL_SUCCESS = 0,
  FDP_NCCL_CUDA_ERROR = 1,
  FDP_NCCL_SYSTEM_ERROR = 2,
  FDP_NCCL_INTERNAL_ERROR = 3,
  FDP_NCCL_INVALID_ARGUMENT = 4,
  FDP_NCCL_INVALID_USAGE = 5,
  FDP_NCCL_REMOTE_ERROR = 6,
  FDP_NCCL_IN_PROGRESS = 7
} fdp_nccl_result;

typedef enum fdp_nccl_dtype {
  FDP_NCCL_INT8 = 0,
  FDP_NCCL_UINT8 = 1,
  FDP_NCCL_INT32 = 2,
  FDP_NCCL_UINT32 = 3,
  FDP_NCCL_INT64 = 4,
  FDP_NCCL_UINT64 = 5,
  FDP_NCCL_FLOAT16 = 6,
  FDP_NCCL_FLOAT32 = 7,
  FDP_NCCL_FLOAT64 = 8,
  FDP_NCCL_BFLOAT16 = 9
} fdp_nccl_dtype;

typedef enum fdp_nccl_op { FDP_NCCL_SUM = 0 } fdp_nccl_op;

/* ncclConfig_t as it was in 2.18. NCCL copies as much of a config as the size says and sets what is
 * newer than the version to its own defaults: size and version belong together. */
typedef struct fdp_nccl_config {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char *net_name;
  int split_share;
} fdp_nccl_config;

static_assert(sizeof(fdp_nccl_config) == 48, "ncclConfig_t of 2.18 has 48 bytes");
static_assert(offsetof(fdp_nccl_config, blocking) == 16, "layout of ncclConfig_t");
static_assert(offsetof(fdp_nccl_config, max_ctas) == 28, "layout of ncclConfig_t");
static_assert(offsetof(fdp_nccl_config, net_name) == 32, "layout of ncclConfig_t");
static_assert(offsetof(fdp_nccl_config, split_share) == 40, "layout of ncclConfig_t");
static_assert(sizeof(fdp_nccl_id) == 128, "ncclUniqueId has 128 bytes");

#define FDP_NCCL_UNDEFINED INT_MIN
/* A blocking communicator; for the rest, NCCL's defaults. */
#define FDP_NCCL_CONFIG                                                                           \
  {sizeof(fdp_nccl_config), 0xcafebeef,         21800, 1,                  FDP_NCCL_UNDEFINED, \
   FDP_NCCL_UNDEFINED,      FDP_NCCL_UNDEFINED, NULL,  FDP_NCCL_UNDEFINED}

/* Streams are CUDA's, as device_cuda_stream.c hands them out. A `const void *` is device memory. */
typedef struct fdp_nccl {
  int (*get_version)(int *version);
  const char *(*get_error_string)(int result);
  const char *(*get_last_error)(const fdp_nccl_comm *comm); /* may be NULL: not in every NCCL */
  int (*get_unique_id)(fdp_nccl_id *id);
  int (*comm_init_rank_config)(fdp_nccl_comm **comm, int rank_count, fdp_nccl_id id, int rank,
                               fdp_nccl_config *config);
  int (*comm_destroy)(fdp_nccl_comm *comm);
  int (*comm_abort)(fdp_nccl_comm *comm);
  int (*comm_get_async_error)(fdp_nccl_comm *comm, int *result);
  int (*group_start)(void);
  int (*group_end)(void);
  int (*broadcast)(const void *source, void *target, size_t count_elems, int dtype, int root,
                   fdp_nccl_comm *comm, void *stream);
  int (*reduce)(const void *source, void *target, size_t count_elems, int dtype, int op, int root,
                fdp_nccl_comm *comm, void *stream);
  int (*send)(const void *source, size_t count_elems, int dtype, int peer, fdp_nccl_comm *comm,
              void *stream);
  int (*recv)(void *target, size_t count_elems, int dtype, int peer, fdp_nccl_comm *comm,
              void *stream);
} fdp_nccl;

#endif
