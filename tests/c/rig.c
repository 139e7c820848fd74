#include "rig.h"

#include <stdlib.h>
#include <string.h>

#include "../../csrc/device_host.h"
#include "check.h"
#include "fake_gpu.h"

#define GUARD 0xA5

rig_array rig_array_open(fdp_dtype dtype, int32_t ndim, const int64_t *shape, rig_layout layout,
                         fdp_device_id device) {
  rig_array array = {.view = {.device = device, .dtype = dtype, .ndim = ndim}};
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(dtype);
  int64_t stride = layout == RIG_GAPS ? 2 : 1;
  int64_t origin = 0;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    int32_t d = layout == RIG_COLUMNS ? ndim - 1 - i : i;
    array.view.shape[d] = shape[d];
    array.view.strides[d] = stride;
    if (layout == RIG_EXPANDED && d == 0) {
      array.view.strides[d] = 0;
      continue;
    }
    if (layout == RIG_NEGATIVE) {
      array.view.strides[d] = -stride;
      if (shape[d] > 0) origin += (shape[d] - 1) * stride;
    }
    stride *= shape[d];
  }
  int64_t shift_bytes = layout == RIG_SHIFTED ? item_bytes : 0;
  array.block_bytes = (stride + 2) * item_bytes + 3 * FDP_ALIGNMENT_BYTES;
  array.block_bytes -= array.block_bytes % FDP_ALIGNMENT_BYTES;
  array.block = aligned_alloc(FDP_ALIGNMENT_BYTES, (size_t)array.block_bytes);
  memset(array.block, GUARD, (size_t)array.block_bytes);
  array.view.data = array.block + FDP_ALIGNMENT_BYTES + shift_bytes + origin * item_bytes;
  return array;
}

void rig_array_close(rig_array *array) {
  free(array->block);
  array->block = NULL;
}

void *rig_address(const fdp_view *view, int64_t index) {
  int64_t offset = 0;
  for (int32_t d = view->ndim - 1; d >= 0; --d) {
    offset += index % view->shape[d] * view->strides[d];
    index /= view->shape[d];
  }
  return (char *)view->data + offset * (int64_t)fdp_dtype_bytes(view->dtype);
}

void rig_store(fdp_dtype dtype, void *address, int64_t value) {
  if (dtype.code == FDP_CODE_FLOAT && dtype.bits == 32) {
    float number = (float)value;
    memcpy(address, &number, sizeof number);
  } else if (dtype.code == FDP_CODE_FLOAT && dtype.bits == 64) {
    double number = (double)value;
    memcpy(address, &number, sizeof number);
  } else {
    size_t item_bytes = fdp_dtype_bytes(dtype);
    memset(address, 0, item_bytes);
    memcpy(address, &value, item_bytes < sizeof value ? item_bytes : sizeof value);
  }
}

int64_t rig_load(fdp_dtype dtype, const void *address) {
  if (dtype.code == FDP_CODE_FLOAT && dtype.bits == 32) {
    float number;
    memcpy(&number, address, sizeof number);
    return (int64_t)number;
  }
  if (dtype.code == FDP_CODE_FLOAT && dtype.bits == 64) {
    double number;
    memcpy(&number, address, sizeof number);
    return (int64_t)number;
  }
  int64_t value = 0;
  size_t item_bytes = fdp_dtype_bytes(dtype);
  memcpy(&value, address, item_bytes < sizeof value ? item_bytes : sizeof value);
  return value;
}

int64_t rig_value(int32_t rank, int64_t index) { return 1 + rank * 7919 + index; }

void rig_fill(const rig_array *array, int32_t rank) {
  int64_t count = fdp_view_count_elems(&array->view);
  for (int64_t i = 0; i < count; ++i) {
    rig_store(array->view.dtype, rig_address(&array->view, i), rig_value(rank, i));
  }
}

bool rig_guards_hold(const rig_array *array) {
  size_t item_bytes = fdp_dtype_bytes(array->view.dtype);
  unsigned char *is_element = calloc(1, (size_t)array->block_bytes);
  int64_t count = fdp_view_count_elems(&array->view);
  for (int64_t i = 0; i < count; ++i) {
    unsigned char *address = rig_address(&array->view, i);
    memset(is_element + (address - array->block), 1, item_bytes);
  }
  bool holds = true;
  for (int64_t i = 0; i < array->block_bytes; ++i) {
    if (!is_element[i] && array->block[i] != GUARD) holds = false;
  }
  free(is_element);
  return holds;
}

fdp_context *rig_context_open(const char *transport) {
  fdp_context *context = NULL;
  if (transport) setenv("FASTDP_TRANSPORT", transport, 1);
  CHECK_OK(fdp_context_open(&context));
  unsetenv("FASTDP_TRANSPORT");
  return context;
}

/* Scratch that is not in use is filled with NaNs, so that a read after its time shows. */
void rig_open(rig *ranks, rig_means means) {
  *ranks = (rig){.means = means};
  static const char *const names[] = {
      [RIG_PEER] = "peer", [RIG_NCCL] = "nccl", [RIG_HOST] = "host"};
  if (means == RIG_NCCL) setenv("FASTDP_NCCL", FAKE_NCCL_PATH, 1);
  ranks->context = rig_context_open(means >= RIG_PEER ? names[means] : NULL);
  for (int32_t r = 0; r < RIG_RANKS; ++r) {
    ranks->ids[r] = host;
    if (means == RIG_AT_ONCE) {
      CHECK_OK(fdp_context_device(ranks->context, host, &ranks->devices[r]));
      continue;
    }
    fdp_device_host_options options = {.ordinal = r + 1, .timeout_ms = 20000};
    if (means >= RIG_PEER) options.kind = FDP_DEVICE_CUDA;
    CHECK_OK(fdp_device_host_open(&options, &ranks->devices[r]));
    if (means == RIG_NCCL) fake_gpu_wrap(ranks->devices[r]);
    CHECK_OK(fdp_context_adopt(ranks->context, ranks->devices[r]));
    CHECK_OK(ranks->devices[r]->ops->stream_open(ranks->devices[r], &ranks->streams[r]));
    ranks->ids[r] = ranks->devices[r]->id;
  }
  for (int32_t r = 0; r < RIG_RANKS; ++r) {
    CHECK_OK(fdp_pool_debug_fill(fdp_context_pool(ranks->context, ranks->devices[r])));
  }
}

void rig_finish(const rig *ranks) {
  for (int32_t r = 0; r < RIG_RANKS; ++r) {
    fdp_device *device = ranks->devices[r];
    fdp_event *event = NULL;
    if (!ranks->streams[r]) continue;
    CHECK_OK(device->ops->event_open(device, &event));
    CHECK_OK(device->ops->event_record(device, event, ranks->streams[r]));
    CHECK_OK(device->ops->event_synchronize(device, event, 20000, NULL));
    device->ops->event_close(device, event);
  }
}

void rig_close(rig *ranks) {
  for (int32_t r = 0; r < RIG_RANKS; ++r) {
    fdp_device *device = ranks->devices[r];
    if (ranks->streams[r]) device->ops->stream_close(device, ranks->streams[r]);
  }
  fdp_context_close(ranks->context);
  if (ranks->means == RIG_NCCL) fake_gpu_finish();
}
