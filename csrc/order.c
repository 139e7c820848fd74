#include "order.h"

#include <pthread.h>
#include <stdlib.h>

#include "deadline.h"

struct fdp_order {
  fdp_device *device;
  int64_t timeout_ms;
  pthread_mutex_t mutex; /* guards event, from its record until the wait is enqueued */
  fdp_event *event;
};

fdp_status fdp_order_open(fdp_device *device, int64_t timeout_ms, fdp_order **order) {
  fdp_order *opened = calloc(1, sizeof *opened);
  if (!opened) return fdp_fail(FDP_OUT_OF_MEMORY, "order: no host memory");
  opened->device = device;
  opened->timeout_ms = timeout_ms;
  fdp_status status = device->ops->event_open(device, &opened->event);
  if (status != FDP_OK) {
    free(opened);
    return status;
  }
  pthread_mutex_init(&opened->mutex, NULL);
  *order = opened;
  return FDP_OK;
}

void fdp_order_close(fdp_order *order) {
  if (!order) return;
  order->device->ops->event_close(order->device, order->event);
  pthread_mutex_destroy(&order->mutex);
  free(order);
}

/* Whatever runs on the host's NULL stream has run when the call returns. */
static bool runs_at_once(const fdp_device *device, const fdp_stream *stream) {
  return !stream && device->id.kind == FDP_DEVICE_HOST;
}

/* A wait that blocks the calling thread has an event of its own, so that nobody queues behind
 * it. */
static fdp_status wait_here(fdp_order *order, fdp_stream *first) {
  fdp_device *device = order->device;
  fdp_event *event = NULL;
  fdp_status status = device->ops->event_open(device, &event);
  if (status != FDP_OK) return status;
  int64_t timeout_ms = fdp_deadline_or(order->timeout_ms);
  FDP_TRY(device->ops->event_record(device, event, first));
  status = device->ops->event_synchronize(device, event, timeout_ms, NULL);
  if (status == FDP_TIMED_OUT) fdp_deadline_pass();
done:
  device->ops->event_close(device, event);
  return status;
}

fdp_status fdp_order_after(fdp_order *order, fdp_stream *first, fdp_stream_ref then) {
  fdp_device *device = order->device;
  if (first == then.stream && device == then.device) return FDP_OK;
  if (runs_at_once(device, first)) return FDP_OK;
  if (runs_at_once(then.device, then.stream) || device->ops != then.device->ops) {
    return wait_here(order, first);
  }
  fdp_status status;
  pthread_mutex_lock(&order->mutex);
  FDP_TRY(device->ops->event_record(device, order->event, first));
  FDP_TRY(then.device->ops->stream_wait(then.device, then.stream, order->event));
done:
  pthread_mutex_unlock(&order->mutex);
  return status;
}
