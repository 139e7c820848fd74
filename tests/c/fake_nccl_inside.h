/* The inside of the NCCL for tests, for the files that make it up. */
#ifndef FDP_TEST_FAKE_NCCL_INSIDE_H
#define FDP_TEST_FAKE_NCCL_INSIDE_H

#include <pthread.h>

#include "../../csrc/nccl.h"
#include "fake_nccl.h"

typedef struct clique {
  fdp_nccl_id id;
  int count;
  pthread_t user; /* while it is in a group */
  bool is_used;
  fdp_nccl_comm *comms[64]; /* NULL once ended */
  fdp_nccl_comm *memory;
} clique;

struct fdp_nccl_comm {
  clique *clique;
  int rank;
  fdp_device *device;
  int async_result;
};

typedef enum op_kind { OP_BROADCAST, OP_REDUCE, OP_SEND, OP_RECV } op_kind;

typedef struct op {
  op_kind kind;
  fdp_nccl_comm *comm;
  const void *source;
  void *target;
  size_t count_elems;
  int dtype;
  int peer;
  fdp_stream *stream;
  bool is_done;
} op;

/* Runs the operations of a group, which belong to cliques with all their ranks. */
void fake_run_ops(op *ops, int op_count);
/* What groups copied through; kept until they cannot run any more. */
void fake_drop_memories(void);
void fake_set_watch(fake_nccl_watch *watch);
/* Nothing of the communicator runs any more. */
void fake_tell_ended(const fdp_nccl_comm *comm);
/* Of fake_nccl.c. */
void fake_violate(const char *text);

#endif
