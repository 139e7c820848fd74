/* What a group of the NCCL for tests does to the ranks' streams. */
#include <stdlib.h>

#include "fake_nccl_inside.h"

typedef struct memory {
  struct memory *next;
  _Alignas(64) char bytes[];
} memory;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static memory *memories;

void fake_drop_memories(void) {
  pthread_mutex_lock(&mutex);
  while (memories) {
    memory *first = memories;
    memories = first->next;
    free(first);
  }
  pthread_mutex_unlock(&mutex);
}

static void *memory_open(size_t size_bytes) {
  memory *opened = aligned_alloc(64, (sizeof *opened + size_bytes + 63) / 64 * 64);
  pthread_mutex_lock(&mutex);
  opened->next = memories;
  memories = opened;
  pthread_mutex_unlock(&mutex);
  return opened->bytes;
}

static const fdp_dtype dtypes[] = {
    {FDP_CODE_INT, 8, 1},    {FDP_CODE_UINT, 8, 1},   {FDP_CODE_INT, 32, 1},
    {FDP_CODE_UINT, 32, 1},  {FDP_CODE_INT, 64, 1},   {FDP_CODE_UINT, 64, 1},
    {FDP_CODE_FLOAT, 16, 1}, {FDP_CODE_FLOAT, 32, 1}, {FDP_CODE_FLOAT, 64, 1},
    {FDP_CODE_BFLOAT, 16, 1}};

static size_t op_bytes(const op *o) { return o->count_elems * fdp_dtype_bytes(dtypes[o->dtype]); }

/* Takes what the op reads out of its source; `then` may read the copy afterwards. */
static void *take_source(const op *from, const op *then) {
  fdp_device *device = from->comm->device;
  fdp_event *event = NULL;
  void *bytes = memory_open(op_bytes(from));
  bool is_ok = device->ops->copy(device, from->stream, bytes, from->source,
                                 (int64_t)op_bytes(from)) == FDP_OK;
  if (then->stream != from->stream || then->comm->device != device) { /* NULL is every device's */
    is_ok &= device->ops->event_open(device, &event) == FDP_OK &&
             device->ops->event_record(device, event, from->stream) == FDP_OK &&
             then->comm->device->ops->stream_wait(then->comm->device, then->stream, event) ==
                 FDP_OK;
    device->ops->event_close(device, event);
  }
  if (!is_ok) fake_violate("the device refused");
  return bytes;
}

static void put_target(const op *o, const void *bytes) {
  fdp_device *device = o->comm->device;
  device->ops->copy(device, o->stream, o->target, bytes, (int64_t)op_bytes(o));
}

static void run_broadcast(op *const *ranks, int count) {
  const op *root = ranks[ranks[0]->peer];
  for (int i = 0; i < count; ++i) {
    if (ranks[i] != root) put_target(ranks[i], take_source(root, ranks[i]));
  }
  if (root->target != root->source) put_target(root, take_source(root, root));
}

static void run_reduce(op *const *ranks, int count) {
  const op *root = ranks[ranks[0]->peer];
  const void *sources[64];
  /* The last rank first: NCCL's order is not the ranks'. */
  for (int i = 0; i < count; ++i) sources[count - 1 - i] = take_source(ranks[i], root);
  fdp_sum sum = {.target = root->target, .sources = sources, .source_count = count,
                 .count_elems = (int64_t)root->count_elems, .dtype = dtypes[root->dtype]};
  fdp_device *device = root->comm->device;
  device->ops->sum(device, root->stream, &sum, 1);
}

static op *find_recv(op *ops, int op_count, const op *send) {
  for (int i = 0; i < op_count; ++i) {
    op *o = &ops[i];
    if (o->is_done || o->kind != OP_RECV || o->comm->clique != send->comm->clique) continue;
    if (o->comm->rank == send->peer && o->peer == send->comm->rank) return o;
  }
  return NULL;
}

/* The next collective of each rank of the clique, which have to be alike. */
static void run_collective(op *ops, int op_count, const op *first) {
  clique *c = first->comm->clique;
  op *ranks[64] = {NULL};
  for (int i = 0; i < op_count; ++i) {
    op *o = &ops[i];
    bool is_collective = o->kind == OP_BROADCAST || o->kind == OP_REDUCE;
    if (o->is_done || !is_collective || o->comm->clique != c || ranks[o->comm->rank]) continue;
    ranks[o->comm->rank] = o;
    o->is_done = true;
  }
  for (int r = 0; r < c->count; ++r) {
    if (!ranks[r]) {
      fake_violate("a collective without all ranks");
      return;
    }
    if (ranks[r]->kind != first->kind || ranks[r]->count_elems != first->count_elems ||
        ranks[r]->dtype != first->dtype || ranks[r]->peer != first->peer) {
      fake_violate("a collective that differs between ranks");
      return;
    }
  }
  if (first->kind == OP_BROADCAST) {
    run_broadcast(ranks, c->count);
  } else {
    run_reduce(ranks, c->count);
  }
}

static fake_nccl_watch *watcher;

void fake_set_watch(fake_nccl_watch *watch) { watcher = watch; }

void fake_tell_ended(const fdp_nccl_comm *comm) {
  if (watcher) watcher(comm->device, NULL, 0, comm->clique, true);
}

/* Each rank of the group once, with all streams that it has in it. */
static void tell_watcher(const op *ops, int op_count, bool ends) {
  for (int i = 0; i < op_count && watcher; ++i) {
    fdp_stream *streams[64];
    int32_t count = 0;
    bool is_first = true;
    for (int k = 0; k < op_count; ++k) {
      if (ops[k].comm != ops[i].comm) continue;
      if (k < i) is_first = false;
      if (count < 64) streams[count++] = ops[k].stream;
    }
    if (is_first) watcher(ops[i].comm->device, streams, count, ops[i].comm->clique, ends);
  }
}

static void run_ops(op *ops, int op_count) {
  for (int i = 0; i < op_count; ++i) {
    op *o = &ops[i];
    if (o->is_done || o->kind == OP_RECV) continue;
    if (o->kind != OP_SEND) {
      run_collective(ops, op_count, o);
      continue;
    }
    op *recv = find_recv(ops, op_count, o);
    o->is_done = true;
    if (!recv || op_bytes(recv) != op_bytes(o)) {
      fake_violate("a send without its receive");
      continue;
    }
    recv->is_done = true;
    put_target(recv, take_source(o, recv));
  }
  for (int i = 0; i < op_count; ++i) {
    if (!ops[i].is_done) fake_violate("a receive without its send");
  }
}

void fake_run_ops(op *ops, int op_count) {
  tell_watcher(ops, op_count, false);
  run_ops(ops, op_count);
  tell_watcher(ops, op_count, true);
}
