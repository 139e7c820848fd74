#include "context.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_host.h"
#include "env.h"
#include "log.h"
#include "transport_local.h"
#ifdef FDP_WITH_CUDA
#include "device_cuda.h"
#endif

/* Distinct devices of one context: more than any machine has. */
#define MAX_DEVICES 64

#define MAX_TRANSPORTS 4

typedef struct context_device {
  fdp_device *device;
  fdp_pool *pool;
  fdp_order *order;
} context_device;

struct fdp_context {
  int64_t timeout_ms;
  const char *forced_transport; /* of FASTDP_TRANSPORT; NULL for "auto" */
  fdp_transport *transports[MAX_TRANSPORTS]; /* in order of preference */
  int32_t transport_count;
  pthread_mutex_t mutex; /* guards all below */
  context_device devices[MAX_DEVICES];
  int32_t device_count;
};

fdp_status fdp_context_open(fdp_context **context) {
  fdp_context *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "context: no host memory");
  pthread_mutex_init(&opened->mutex, NULL);
  int32_t choice = 0;
  fdp_status status;
  FDP_TRY(fdp_env_integer(FDP_ENV_TIMEOUT_MS, &opened->timeout_ms));
  FDP_TRY(fdp_env_choice(FDP_ENV_TRANSPORT, &choice));
  if (choice > 0) opened->forced_transport = fdp_env_choice_name(FDP_ENV_TRANSPORT, choice);
  FDP_TRY(fdp_transport_local_open(&opened->transports[0]));
  opened->transport_count = 1;
  *context = opened;
  opened = NULL;
done:
  fdp_context_close(opened);
  return status;
}

static void entry_close(context_device *entry) {
  fdp_pool_close(entry->pool);
  fdp_order_close(entry->order);
  if (entry->device) entry->device->ops->close(entry->device);
}

void fdp_context_close(fdp_context *context) {
  if (!context) return;
  for (int32_t i = context->transport_count - 1; i >= 0; --i) {
    context->transports[i]->ops->close(context->transports[i]);
  }
  for (int32_t i = context->device_count - 1; i >= 0; --i) entry_close(&context->devices[i]);
  pthread_mutex_destroy(&context->mutex);
  free(context);
}

/* Takes `device` over, also when it fails. */
static fdp_status add_device_locked(fdp_context *context, fdp_device *device,
                                    context_device **entry) {
  context_device added = {.device = device};
  fdp_status status;
  if (context->device_count == MAX_DEVICES) {
    status = fdp_fail(FDP_UNSUPPORTED, "context: more than %d devices", MAX_DEVICES);
    goto done;
  }
  FDP_TRY(fdp_pool_open(device, FDP_POOL_IDLE_BYTES, &added.pool));
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

/* FASTDP_TRANSPORT is about GPUs: host memory has no choice of means. */
static bool may_use(const fdp_context *context, const fdp_transport *transport, bool all_cuda) {
  if (!context->forced_transport || !all_cuda) return true;
  return strcmp(context->forced_transport, transport->ops->name) == 0;
}

fdp_status fdp_context_transport(fdp_context *context, fdp_device_id home,
                                 const fdp_device_id *others, int32_t other_count,
                                 const fdp_transport **transport) {
  fdp_device_id places[FDP_MAX_REPLICAS];
  assert(other_count <= FDP_MAX_REPLICAS);
  home = fdp_device_place(home);
  bool all_cuda = home.kind == FDP_DEVICE_CUDA;
  for (int32_t i = 0; i < other_count; ++i) {
    places[i] = fdp_device_place(others[i]);
    if (places[i].kind != FDP_DEVICE_CUDA) all_cuda = false;
  }
  char reasons[FDP_MESSAGE_BYTES / 2] = "";
  size_t used = 0;
  for (int32_t i = 0; i < context->transport_count; ++i) {
    const fdp_transport *candidate = context->transports[i];
    char reason[160] = "FASTDP_TRANSPORT asks for another";
    if (may_use(context, candidate, all_cuda) &&
        candidate->ops->joins(candidate, home, places, other_count, reason, sizeof reason)) {
      fdp_log(FDP_LOG_DEBUG, "transport %s%s%s", candidate->ops->name, used ? ", since " : "",
              reasons);
      *transport = candidate;
      return FDP_OK;
    }
    int written = snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "",
                           candidate->ops->name, reason);
    if (written > 0) used += (size_t)written;
    if (used >= sizeof reasons) used = sizeof reasons - 1;
  }
  return fdp_fail(FDP_UNSUPPORTED, "no transport joins the devices (FASTDP_TRANSPORT=%s; %s)",
                  context->forced_transport ? context->forced_transport : "auto", reasons);
}

static fdp_endpoint endpoint_of(const context_device *entry, fdp_stream *stream) {
  return (fdp_endpoint){entry->device, stream, entry->pool, entry->order};
}

fdp_status fdp_context_party(fdp_context *context, fdp_device_id home, fdp_stream *home_stream,
                             const fdp_device_id *others, fdp_stream *const *streams,
                             int32_t other_count, fdp_party *party) {
  assert(other_count > 0 && other_count <= FDP_MAX_REPLICAS);
  fdp_status status =
      fdp_context_transport(context, home, others, other_count, &party->transport);
  if (status != FDP_OK) return status;
  party->other_count = other_count;
  context_device *entry = NULL;
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
