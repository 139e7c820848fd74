#include "context.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deadline.h"
#include "device_host.h"
#include "env.h"
#include "log.h"
#include "transport_host.h"
#include "transport_local.h"
#include "transport_nccl.h"
#include "transport_peer.h"
#ifdef FDP_WITH_CUDA
#include "device_cuda.h"
#endif

#define MAX_TRANSPORTS 5 /* and a NULL */

typedef struct context_device {
  fdp_device *device;
  fdp_pool *pool;
  fdp_pool *pinned;
  fdp_order *order;
} context_device;

struct fdp_context {
  int64_t timeout_ms;
  const char *standard_transport; /* of FASTDP_TRANSPORT; NULL for "auto" */
  fdp_transport *transports[MAX_TRANSPORTS]; /* in order of preference, up to NULL */
  int32_t transport_count;
  pthread_mutex_t mutex; /* guards all below */
  context_device devices[FDP_MAX_DEVICES];
  int32_t device_count;
};

/* The order of preference. */
static fdp_status open_transports(fdp_context *context) {
  fdp_transport **next = context->transports;
  fdp_transport *peer = NULL;
  fdp_status status;
  FDP_TRY(fdp_transport_local_open(next++));
  FDP_TRY(fdp_transport_peer_open(context->timeout_ms, &peer));
  *next++ = peer;
  FDP_TRY(fdp_transport_nccl_open(context->timeout_ms, fdp_transport_peer_book(peer), next++));
  FDP_TRY(fdp_transport_host_open(next++));
done:
  while (context->transports[context->transport_count]) context->transport_count += 1;
  return status;
}

fdp_status fdp_context_open(fdp_context **context) {
  fdp_context *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "context: no host memory");
  pthread_mutex_init(&opened->mutex, NULL);
  int32_t choice = 0;
  fdp_status status;
  FDP_TRY(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &opened->timeout_ms));
  FDP_TRY(fdp_env_choice(FDP_ENV_TRANSPORT, &choice));
  if (choice > 0) opened->standard_transport = fdp_env_choice_name(FDP_ENV_TRANSPORT, choice);
  FDP_TRY(open_transports(opened));
  *context = opened;
  opened = NULL;
done:
  fdp_context_close(opened);
  return status;
}

/* Safe to call again. */
static void close_pools(context_device *entry) {
  fdp_pool_close(entry->pool);
  fdp_pool_close(entry->pinned);
  entry->pool = entry->pinned = NULL;
}

static void entry_close(context_device *entry) {
  close_pools(entry);
  fdp_order_close(entry->order);
  if (entry->device) entry->device->ops->close(entry->device);
}

void fdp_context_close(fdp_context *context) {
  if (!context) return;
  for (int32_t i = context->transport_count - 1; i >= 0; --i) {
    context->transports[i]->ops->close(context->transports[i]);
  }
  /* A pool's buffers have events of other devices. */
  for (int32_t i = 0; i < context->device_count; ++i) close_pools(&context->devices[i]);
  for (int32_t i = context->device_count - 1; i >= 0; --i) entry_close(&context->devices[i]);
  pthread_mutex_destroy(&context->mutex);
  free(context);
}

/* Takes `device` over, also when it fails. */
static fdp_status add_device_locked(fdp_context *context, fdp_device *device,
                                    context_device **entry) {
  context_device added = {.device = device};
  fdp_status status;
  if (context->device_count == FDP_MAX_DEVICES) {
    status = fdp_fail(FDP_UNSUPPORTED, "context: more than %d devices", FDP_MAX_DEVICES);
    goto done;
  }
  FDP_TRY(fdp_pool_open(device, FDP_POOL_IDLE_BYTES, &added.pool));
  FDP_TRY(fdp_pool_open_pinned(device, FDP_POOL_IDLE_BYTES, &added.pinned));
  FDP_TRY(fdp_order_open(device, context->timeout_ms, &added.order));
  context->devices[context->device_count] = added;
  *entry = &context->devices[context->device_count++];
  added = (context_device){0};
done:
  entry_close(&added);
  return status;
}

static fdp_status open_device(const fdp_context *context, fdp_device_id id, fdp_device **device) {
  char text[32];
  fdp_device_text(id, text, sizeof text);
  if (id.kind == FDP_DEVICE_HOST) {
    if (id.ordinal != 0) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "device %s: the host has ordinal 0 only", text);
    }
    fdp_device_host_options options = {.timeout_ms = context->timeout_ms};
    return fdp_device_host_open(&options, device);
  }
  if (id.kind == FDP_DEVICE_CUDA) {
#ifdef FDP_WITH_CUDA
    return fdp_device_cuda_open(id.ordinal, device);
#else
    return fdp_fail(FDP_UNSUPPORTED, "device %s: this build has no CUDA backend", text);
#endif
  }
  return fdp_fail(FDP_UNSUPPORTED, "device %s: only the host and CUDA devices are supported", text);
}

static context_device *find_device_locked(fdp_context *context, fdp_device_id id) {
  for (int32_t i = 0; i < context->device_count; ++i) {
    if (fdp_device_equal(context->devices[i].device->id, id)) return &context->devices[i];
  }
  return NULL;
}

static fdp_status get_device_locked(fdp_context *context, fdp_device_id id,
                                    context_device **entry) {
  *entry = find_device_locked(context, id);
  if (*entry) return FDP_OK;
  fdp_device *device = NULL;
  fdp_status status = open_device(context, fdp_device_place(id), &device);
  if (status != FDP_OK) return status;
  return add_device_locked(context, device, entry);
}

fdp_status fdp_context_device(fdp_context *context, fdp_device_id id, fdp_device **device) {
  context_device *entry = NULL;
  pthread_mutex_lock(&context->mutex);
  fdp_status status = get_device_locked(context, id, &entry);
  if (status == FDP_OK) *device = entry->device;
  pthread_mutex_unlock(&context->mutex);
  return status;
}

fdp_status fdp_context_adopt(fdp_context *context, fdp_device *device) {
  context_device *entry = NULL;
  fdp_status status;
  pthread_mutex_lock(&context->mutex);
  if (find_device_locked(context, device->id)) {
    char text[32];
    status = fdp_fail(FDP_INVALID_ARGUMENT, "device %s: is open already",
                      fdp_device_text(device->id, text, sizeof text));
    device->ops->close(device);
  } else {
    status = add_device_locked(context, device, &entry);
  }
  pthread_mutex_unlock(&context->mutex);
  return status;
}

fdp_pool *fdp_context_pool(fdp_context *context, fdp_device *device) {
  pthread_mutex_lock(&context->mutex);
  context_device *entry = find_device_locked(context, device->id);
  assert(entry && entry->device == device);
  fdp_pool *pool = entry->pool;
  pthread_mutex_unlock(&context->mutex);
  return pool;
}

static int64_t held_bytes(fdp_pool *pool, bool trim) {
  if (trim) fdp_pool_trim(pool);
  fdp_pool_stats stats = fdp_pool_read_stats(pool);
  return stats.lent_bytes + stats.idle_bytes;
}

int32_t fdp_context_scratch(fdp_context *context, bool trim, fdp_scratch *scratch) {
  context_device opened[FDP_MAX_DEVICES];
  pthread_mutex_lock(&context->mutex);
  int32_t count = context->device_count;
  memcpy(opened, context->devices, sizeof opened);
  pthread_mutex_unlock(&context->mutex);
  /* Giving memory back may take a while; devices stay open until the context closes. */
  for (int32_t i = 0; i < count; ++i) {
    scratch[i].id = opened[i].device->id;
    scratch[i].device_bytes = held_bytes(opened[i].pool, trim);
    scratch[i].pinned_bytes = held_bytes(opened[i].pinned, trim);
  }
  return count;
}

static fdp_endpoint endpoint_of(const context_device *entry, fdp_stream *stream) {
  return (fdp_endpoint){entry->device, stream, entry->pool, entry->pinned, entry->order};
}

/* Everyone, but no transport yet. */
static fdp_status gather_party(fdp_context *context, fdp_device_id home, fdp_stream *home_stream,
                               const fdp_device_id *others, fdp_stream *const *streams,
                               int32_t other_count, fdp_party *party) {
  assert(other_count > 0 && other_count <= FDP_MAX_REPLICAS);
  context_device *entry = NULL;
  fdp_status status;
  party->other_count = other_count;
  pthread_mutex_lock(&context->mutex);
  FDP_TRY(get_device_locked(context, home, &entry));
  party->home = endpoint_of(entry, home_stream);
  for (int32_t i = 0; i < other_count; ++i) {
    FDP_TRY(get_device_locked(context, others[i], &entry));
    party->others[i] = endpoint_of(entry, streams ? streams[i] : NULL);
  }
done:
  pthread_mutex_unlock(&context->mutex);
  return status;
}

/* FASTDP_TRANSPORT is about GPUs: host memory has no choice of means. */
static bool are_gpus(const fdp_party *party) {
  if (party->home.device->id.kind != FDP_DEVICE_CUDA) return false;
  for (int32_t i = 0; i < party->other_count; ++i) {
    if (party->others[i].device->id.kind != FDP_DEVICE_CUDA) return false;
  }
  return true;
}

static fdp_status joins(const fdp_transport *transport, const fdp_party *party) {
  return transport->ops->joins(transport, &party->home, party->others, party->other_count);
}

/* `option` is how it was asked for. */
static fdp_status choose_only(fdp_context *context, const char *name, const char *option,
                              fdp_party *party, char *reason, size_t reason_bytes) {
  char missing[FDP_MESSAGE_BYTES / 2];
  for (int32_t i = 0; i < context->transport_count; ++i) {
    const fdp_transport *candidate = context->transports[i];
    if (strcmp(name, candidate->ops->name) != 0) continue;
    fdp_status status = joins(candidate, party);
    party->transport = candidate;
    snprintf(reason, reason_bytes, "%s asks for it", option);
    if (status != FDP_UNSUPPORTED) return status;
    snprintf(missing, sizeof missing, "%s", fdp_last_message());
    return fdp_fail(status, "%s=%s does not join the devices: %s", option, name, missing);
  }
  return fdp_fail(FDP_UNSUPPORTED, "%s=%s: this build has no such transport", option, name);
}

static fdp_status choose_first(fdp_context *context, fdp_party *party, char *reason,
                               size_t reason_bytes) {
  size_t used = 0;
  snprintf(reason, reason_bytes, "it is the first that is tried");
  for (int32_t i = 0;; ++i) {
    assert(i < context->transport_count); /* the last joins anything */
    party->transport = context->transports[i];
    fdp_status status = joins(party->transport, party);
    if (status != FDP_UNSUPPORTED) return status;
    int written = snprintf(reason + used, reason_bytes - used, "%s%s: %s", used ? "; " : "",
                           party->transport->ops->name, fdp_last_message());
    if (written > 0) used += (size_t)written;
    if (used >= reason_bytes) used = reason_bytes - 1;
  }
}

static fdp_status choose(fdp_context *context, const char *wanted, fdp_party *party, char *reason,
                         size_t reason_bytes) {
  const char *option = "transport";
  if (!wanted && are_gpus(party)) {
    wanted = context->standard_transport;
    option = fdp_env_describe(FDP_ENV_TRANSPORT)->name;
  }
  if (!wanted || strcmp(wanted, "auto") == 0) {
    return choose_first(context, party, reason, reason_bytes);
  }
  return choose_only(context, wanted, option, party, reason, reason_bytes);
}

fdp_status fdp_context_transport(fdp_context *context, const char *wanted, fdp_device_id home,
                                 const fdp_device_id *others, int32_t other_count,
                                 const char **name, char *reason, size_t reason_bytes) {
  fdp_party party;
  fdp_status status = gather_party(context, home, NULL, others, NULL, other_count, &party);
  if (status == FDP_OK) status = choose(context, wanted, &party, reason, reason_bytes);
  if (status == FDP_OK) *name = party.transport->ops->name;
  return status;
}

fdp_status fdp_context_party(fdp_context *context, const char *wanted, fdp_device_id home,
                             fdp_stream *home_stream, const fdp_device_id *others,
                             fdp_stream *const *streams, int32_t other_count, fdp_party *party) {
  char reason[FDP_MESSAGE_BYTES / 2] = "";
  fdp_deadline_start();
  fdp_status status =
      gather_party(context, home, home_stream, others, streams, other_count, party);
  if (status == FDP_OK) status = choose(context, wanted, party, reason, sizeof reason);
  if (status == FDP_OK) {
    fdp_log(FDP_LOG_DEBUG, "transport %s, since %s", party->transport->ops->name, reason);
  }
  return status;
}

fdp_status fdp_context_transport_name(const char *name, const char **found) {
  for (int32_t i = 0; *fdp_env_choice_name(FDP_ENV_TRANSPORT, i) != '\0'; ++i) {
    const char *choice = fdp_env_choice_name(FDP_ENV_TRANSPORT, i);
    if (strcmp(name, choice) != 0) continue;
    *found = choice;
    return FDP_OK;
  }
  return fdp_fail(FDP_INVALID_ARGUMENT, "transport is \"%.100s\": must be one of %s", name,
                  fdp_env_describe(FDP_ENV_TRANSPORT)->type_text);
}
