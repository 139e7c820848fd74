#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl_inside.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_OPS 4096

typedef struct init_op {
  fdp_nccl_comm **comm;
  int count;
  fdp_nccl_id id;
  int rank;
  fdp_device *device;
} init_op;

/* A group of one thread. */
typedef struct group {
  int depth;
  int result; /* of the first call that failed */
  op ops[MAX_OPS];
  int op_count;
  init_op inits[64];
  int init_count;
} group;

static _Thread_local group *current_group;
static _Thread_local fdp_device *current_device;

static struct {
  pthread_mutex_t mutex; /* guards all below */
  pthread_cond_t released;
  fake_nccl_counts counts;
  int version;
  char failing[40];
  int failing_in;
  int failing_result;
  char hanging[40];
  int hung_count;
  unsigned id_count;
  void (*spare)(bool is_on);
  clique *cliques[256];
  int clique_count;
} state = {.mutex = PTHREAD_MUTEX_INITIALIZER,
           .released = PTHREAD_COND_INITIALIZER,
           .version = 23007};

static void violate_locked(const char *text) {
  if (state.counts.violations++ > 0) return;
  snprintf(state.counts.violation, sizeof state.counts.violation, "%s", text);
}

void fake_violate(const char *text) {
  pthread_mutex_lock(&state.mutex);
  violate_locked(text);
  pthread_mutex_unlock(&state.mutex);
}

/* Every function comes through here first. */
static int arrive(const char *call) {
  int result = FDP_NCCL_SUCCESS;
  pthread_mutex_lock(&state.mutex);
  if (strcmp(state.hanging, call) == 0) {
    state.hung_count += 1;
    while (strcmp(state.hanging, call) == 0) pthread_cond_wait(&state.released, &state.mutex);
    state.hung_count -= 1;
    pthread_cond_broadcast(&state.released);
    result = FDP_NCCL_INTERNAL_ERROR;
  } else if (strcmp(state.failing, call) == 0 && state.failing_in > 0 && --state.failing_in == 0) {
    result = state.failing_result;
  }
  pthread_mutex_unlock(&state.mutex);
  if (result != FDP_NCCL_SUCCESS && current_group) current_group->result = result;
  return result;
}

static void spare(bool is_on) {
  if (state.spare) state.spare(is_on);
}

static void run_inits(group *g) {
  clique *made = calloc(1, sizeof *made);
  pthread_mutex_lock(&state.mutex);
  state.cliques[state.clique_count++] = made;
  made->id = g->inits[0].id;
  made->count = g->inits[0].count;
  made->memory = calloc(64, sizeof *made->memory);
  if (g->init_count != made->count) violate_locked("init without all ranks");
  for (int i = 0; i < g->init_count; ++i) {
    init_op *init = &g->inits[i];
    fdp_nccl_comm *comm = &made->memory[i];
    *comm = (fdp_nccl_comm){made, init->rank, init->device, FDP_NCCL_SUCCESS};
    bool is_new = init->rank >= 0 && init->rank < made->count && !made->comms[init->rank];
    if (!is_new || !init->device || memcmp(&init->id, &made->id, sizeof made->id) != 0 ||
        init->count != made->count) {
      violate_locked("init with the wrong rank, count, id or no device");
    }
    made->comms[init->rank] = comm;
    *init->comm = comm;
    state.counts.made += 1;
  }
  pthread_mutex_unlock(&state.mutex);
}

/* --- NCCL's functions --- */

EXPORT int ncclGetVersion(int *version);
EXPORT const char *ncclGetErrorString(int result);
EXPORT const char *ncclGetLastError(const fdp_nccl_comm *comm);
EXPORT int ncclGetUniqueId(fdp_nccl_id *id);
EXPORT int ncclCommInitRankConfig(fdp_nccl_comm **comm, int count, fdp_nccl_id id, int rank,
                                  fdp_nccl_config *config);
EXPORT int ncclCommDestroy(fdp_nccl_comm *comm);
EXPORT int ncclCommAbort(fdp_nccl_comm *comm);
EXPORT int ncclCommGetAsyncError(fdp_nccl_comm *comm, int *result);
EXPORT int ncclGroupStart(void);
EXPORT int ncclGroupEnd(void);
EXPORT int ncclBroadcast(const void *source, void *target, size_t count, int dtype, int root,
                         fdp_nccl_comm *comm, void *stream);
EXPORT int ncclReduce(const void *source, void *target, size_t count, int dtype, int sum, int root,
                      fdp_nccl_comm *comm, void *stream);
EXPORT int ncclSend(const void *source, size_t count, int dtype, int peer, fdp_nccl_comm *comm,
                    void *stream);
EXPORT int ncclRecv(void *target, size_t count, int dtype, int peer, fdp_nccl_comm *comm,
                    void *stream);

int ncclGetVersion(int *version) {
  pthread_mutex_lock(&state.mutex);
  *version = state.version;
  pthread_mutex_unlock(&state.mutex);
  return arrive("ncclGetVersion");
}

const char *ncclGetErrorString(int result) {
  static const char *const texts[] = {"no error",         "unhandled cuda error",
                                      "unhandled system error", "internal error",
                                      "invalid argument", "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return texts[result];
}

const char *ncclGetLastError(const fdp_nccl_comm *comm) {
  (void)comm;
  return "the fake was told to";
}

int ncclGetUniqueId(fdp_nccl_id *id) {
  memset(id, 0, sizeof *id);
  pthread_mutex_lock(&state.mutex);
  state.id_count += 1;
  memcpy(id, &state.id_count, sizeof state.id_count);
  pthread_mutex_unlock(&state.mutex);
  return arrive("ncclGetUniqueId");
}

int ncclGroupStart(void) {
  int result = arrive("ncclGroupStart");
  if (result != FDP_NCCL_SUCCESS) return result;
  if (!current_group) current_group = calloc(1, sizeof *current_group);
  current_group->depth += 1;
  return FDP_NCCL_SUCCESS;
}

int ncclGroupEnd(void) {
  group *g = current_group;
  if (!g) {
    fake_violate("a group is ended that was not started");
    return FDP_NCCL_INVALID_USAGE;
  }
  int result = arrive("ncclGroupEnd");
  if (--g->depth > 0) return result;
  current_group = NULL;
  if (result == FDP_NCCL_SUCCESS) result = g->result;
  if (result == FDP_NCCL_SUCCESS && g->init_count > 0) run_inits(g);
  spare(true);
  if (result == FDP_NCCL_SUCCESS) fake_run_ops(g->ops, g->op_count);
  spare(false);
  pthread_mutex_lock(&state.mutex);
  for (int i = 0; i < g->op_count; ++i) g->ops[i].comm->clique->is_used = false;
  pthread_mutex_unlock(&state.mutex);
  free(g);
  return result;
}

int ncclCommInitRankConfig(fdp_nccl_comm **comm, int count, fdp_nccl_id id, int rank,
                           fdp_nccl_config *config) {
  int result = arrive("ncclCommInitRankConfig");
  if (result != FDP_NCCL_SUCCESS) return result;
  if (config->size != 48 || config->magic != 0xcafebeef || config->version != 21800 ||
      config->blocking != 1) {
    fake_violate("a wrong config");
  }
  pthread_mutex_lock(&state.mutex);
  int ctas = config->max_ctas == FDP_NCCL_UNDEFINED ? 0 : config->max_ctas;
  if (ctas > 0 && (state.counts.least_ctas == 0 || ctas < state.counts.least_ctas)) {
    state.counts.least_ctas = ctas;
  }
  pthread_mutex_unlock(&state.mutex);
  if (!current_group) {
    fake_violate("init outside a group");
    return FDP_NCCL_INVALID_USAGE;
  }
  current_group->inits[current_group->init_count++] =
      (init_op){comm, count, id, rank, current_device};
  current_device = NULL; /* each rank has to say its own */
  return FDP_NCCL_SUCCESS;
}

static int end_comm(fdp_nccl_comm *comm, int *counter) {
  fake_tell_ended(comm);
  pthread_mutex_lock(&state.mutex);
  *counter += 1;
  clique *c = comm->clique;
  if (c->comms[comm->rank] != comm) violate_locked("a communicator is ended twice");
  c->comms[comm->rank] = NULL;
  if (counter == &state.counts.aborted) {
    state.hanging[0] = '\0';
    pthread_cond_broadcast(&state.released);
  }
  pthread_mutex_unlock(&state.mutex);
  return FDP_NCCL_SUCCESS;
}

int ncclCommDestroy(fdp_nccl_comm *comm) {
  int result = arrive("ncclCommDestroy");
  return result != FDP_NCCL_SUCCESS ? result : end_comm(comm, &state.counts.destroyed);
}

int ncclCommAbort(fdp_nccl_comm *comm) {
  int result = arrive("ncclCommAbort");
  return result != FDP_NCCL_SUCCESS ? result : end_comm(comm, &state.counts.aborted);
}

int ncclCommGetAsyncError(fdp_nccl_comm *comm, int *result) {
  pthread_mutex_lock(&state.mutex);
  *result = comm->async_result;
  pthread_mutex_unlock(&state.mutex);
  return arrive("ncclCommGetAsyncError");
}

static int add(const char *call, op o, int *counter) {
  int result = arrive(call);
  if (result != FDP_NCCL_SUCCESS) return result;
  if (!current_group) {
    fake_violate("an operation outside a group");
    return FDP_NCCL_INVALID_USAGE;
  }
  pthread_mutex_lock(&state.mutex);
  clique *c = o.comm->clique;
  if (c->is_used && !pthread_equal(c->user, pthread_self())) violate_locked("two threads at once");
  c->is_used = true;
  c->user = pthread_self();
  if (counter) *counter += 1;
  pthread_mutex_unlock(&state.mutex);
  current_group->ops[current_group->op_count++] = o;
  return FDP_NCCL_SUCCESS;
}

int ncclBroadcast(const void *source, void *target, size_t count, int dtype, int root,
                  fdp_nccl_comm *comm, void *stream) {
  op o = {OP_BROADCAST, comm, source, target, count, dtype, root, stream, false};
  return add("ncclBroadcast", o, &state.counts.broadcasts);
}

int ncclReduce(const void *source, void *target, size_t count, int dtype, int sum, int root,
               fdp_nccl_comm *comm, void *stream) {
  op o = {OP_REDUCE, comm, source, target, count, dtype, root, stream, false};
  if (sum != FDP_NCCL_SUM) fake_violate("no sum");
  return add("ncclReduce", o, &state.counts.reduces);
}

int ncclSend(const void *source, size_t count, int dtype, int peer, fdp_nccl_comm *comm,
             void *stream) {
  op o = {OP_SEND, comm, source, NULL, count, dtype, peer, stream, false};
  return add("ncclSend", o, &state.counts.sends);
}

int ncclRecv(void *target, size_t count, int dtype, int peer, fdp_nccl_comm *comm, void *stream) {
  op o = {OP_RECV, comm, NULL, target, count, dtype, peer, stream, false};
  return add("ncclRecv", o, NULL);
}

/* --- the table of tests --- */

static void release_locked(void) {
  state.hanging[0] = '\0';
  pthread_cond_broadcast(&state.released);
  while (state.hung_count > 0) pthread_cond_wait(&state.released, &state.mutex);
}

static void release(void) {
  pthread_mutex_lock(&state.mutex);
  release_locked();
  pthread_mutex_unlock(&state.mutex);
}

static void reset(void) {
  pthread_mutex_lock(&state.mutex);
  release_locked();
  fake_drop_memories();
  for (int i = 0; i < state.clique_count; ++i) {
    clique *c = state.cliques[i];
    free(c->memory);
    free(c);
  }
  state.clique_count = 0;
  state.counts = (fake_nccl_counts){0};
  state.version = 23007;
  state.failing_in = 0;
  pthread_mutex_unlock(&state.mutex);
}

static fake_nccl_counts read_counts(void) {
  pthread_mutex_lock(&state.mutex);
  fake_nccl_counts counts = state.counts;
  pthread_mutex_unlock(&state.mutex);
  return counts;
}

static void set_version(int version) {
  pthread_mutex_lock(&state.mutex);
  state.version = version;
  pthread_mutex_unlock(&state.mutex);
}

static void fail_call(const char *call, int nth, int result) {
  pthread_mutex_lock(&state.mutex);
  snprintf(state.failing, sizeof state.failing, "%s", call);
  state.failing_in = nth;
  state.failing_result = result;
  pthread_mutex_unlock(&state.mutex);
}

static void hang(const char *call) {
  pthread_mutex_lock(&state.mutex);
  snprintf(state.hanging, sizeof state.hanging, "%s", call);
  pthread_mutex_unlock(&state.mutex);
}

static void fail_rank(int rank, int result) {
  pthread_mutex_lock(&state.mutex);
  for (int i = 0; i < state.clique_count; ++i) {
    clique *c = state.cliques[i];
    if (rank < c->count && c->comms[rank]) c->comms[rank]->async_result = result;
  }
  pthread_mutex_unlock(&state.mutex);
}

static void set_current(fdp_device *device) { current_device = device; }

static void set_spare(void (*function)(bool is_on)) { state.spare = function; }

static int depth(void) { return current_group ? current_group->depth : 0; }

EXPORT const fake_nccl_table fake_nccl = {reset,       read_counts, set_version,  fail_call,
                                          hang,        release,     fail_rank,    set_current,
                                          depth,       fake_violate, set_spare,
                                          fake_set_watch};
