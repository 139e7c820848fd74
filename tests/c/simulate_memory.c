#include <stdlib.h>
#include <string.h>

#include "simulate.h"

void *run_keep(run *own, size_t size_bytes) {
  kept *made = aligned_alloc(64, (sizeof *made + size_bytes + 63) / 64 * 64);
  made->next = own->kept;
  own->kept = made;
  memset(made->bytes, 0, size_bytes);
  return made->bytes;
}

void run_forget(run *own) {
  while (own->kept) {
    kept *first = own->kept;
    own->kept = first->next;
    free(first);
  }
}

static user_block *block_take(run *own, int32_t device, fdp_stream *stream, int64_t size_bytes) {
  for (user_block *block = own->blocks; block; block = block->next) {
    bool fits = block->is_free && block->device == device && block->stream == stream &&
                block->size_bytes == size_bytes;
    if (!fits) continue;
    block->is_free = false;
    return block;
  }
  user_block *made = calloc(1, sizeof *made);
  *made = (user_block){own->blocks, device, stream, size_bytes, NULL, false};
  own->blocks = made;
  sim_spare(own->world, true);
  own->devices[device]->ops->memory_take(own->devices[device], (size_t)size_bytes, &made->data);
  sim_spare(own->world, false);
  return made;
}

user_array array_take(run *own, int32_t device, fdp_stream *stream, fdp_dtype dtype, int32_t ndim,
                      const int64_t *shape, rig_layout layout) {
  user_array made = {.view = {.device = own->devices[device]->id, .dtype = dtype, .ndim = ndim}};
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(dtype);
  int64_t stride = layout == RIG_GAPS ? 2 : 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    int32_t d = layout == RIG_COLUMNS ? ndim - 1 - i : i;
    made.view.shape[d] = shape[d];
    made.view.strides[d] = stride;
    stride *= shape[d];
  }
  made.block = block_take(own, device, stream, (stride + 1) * item_bytes);
  made.view.data = (char *)made.block->data + (layout == RIG_SHIFTED ? item_bytes : 0);
  return made;
}

void array_free(user_array *array) {
  if (array->block) array->block->is_free = true;
  array->block = NULL;
}

void array_poison(run *own, const user_array *array, fdp_stream *stream) {
  if (!stream) stream = sim_default_stream(own->devices[array->block->device]);
  sim_write(stream, &array->view, 0xFF);
}

static void run_nothing(void *argument) { (void)argument; }

void run_claim(run *own, int32_t device, fdp_stream *stream, const fdp_view *view) {
  sim_work(own->devices[device], stream, "the owner's write", run_nothing, NULL, NULL, 0, view, 1);
}

static void tell(run *own, int32_t device, fdp_stream *stream) {
  sim_work(own->devices[device], stream, "nothing", run_nothing, NULL, NULL, 0, NULL, 0);
}

void caller_tell(caller *own) {
  for (int32_t r = 0; r < own->replica_count; ++r) {
    tell(own->run, own->devices[r], own->compute[r]);
  }
  tell(own->run, 0, own->compute[MAX_REPLICAS]);
}

void run_drop_blocks(run *own) {
  while (own->blocks) {
    user_block *first = own->blocks;
    fdp_device *device = own->devices[first->device];
    own->blocks = first->next;
    device->ops->memory_drop(device, first->data);
    free(first);
  }
}

fdp_event *run_event(run *own, int32_t device, fdp_stream *stream) {
  fdp_device *on = own->devices[device];
  fdp_event *event = NULL;
  sim_spare(own->world, true);
  on->ops->event_open(on, &event);
  on->ops->event_record(on, event, stream);
  sim_spare(own->world, false);
  return event;
}

void run_wait(run *own, int32_t device, fdp_stream *stream, fdp_event *event) {
  fdp_device *on = own->devices[device];
  sim_spare(own->world, true);
  on->ops->stream_wait(on, stream, event);
  sim_spare(own->world, false);
}

void run_event_close(run *own, int32_t device, fdp_event *event) {
  own->devices[device]->ops->event_close(own->devices[device], event);
}

void run_order(run *own, int32_t device, fdp_stream *first, int32_t then_device,
               fdp_stream *then) {
  if (first == then && device == then_device) return;
  fdp_event *event = run_event(own, device, first);
  run_wait(own, then_device, then, event);
  run_event_close(own, device, event);
}
