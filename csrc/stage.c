#include "stage.h"

#include <assert.h>

int64_t fdp_stage_room_bytes(int64_t size_bytes) {
  int64_t mask = FDP_ALIGNMENT_BYTES - 1;
  return (size_bytes + mask) & ~mask;
}

fdp_status fdp_stage_open(fdp_stage *stage, const fdp_endpoint *endpoint, int64_t size_bytes) {
  stage->endpoint = *endpoint;
  return fdp_pool_take(endpoint->pool, size_bytes, endpoint->stream, &stage->buffer);
}

fdp_status fdp_stage_plan(const fdp_stage *stage, fdp_copy_list *list, const fdp_view *source,
                          const fdp_view *layout, int64_t *used_bytes, void **address) {
  fdp_view target = *layout;
  target.data = (char *)stage->buffer->data + *used_bytes;
  *address = target.data;
  *used_bytes += fdp_stage_room_bytes(fdp_view_size_bytes(layout));
  assert(*used_bytes <= stage->buffer->size_bytes);
  return fdp_plan_copy(list, &target, source);
}

fdp_status fdp_stage_run(const fdp_stage *stage, const fdp_copy_list *list) {
  if (list->count == 0) return FDP_OK;
  fdp_device *device = stage->endpoint.device;
  return device->ops->copy_strided(device, stage->endpoint.stream, list->copies, list->count);
}

fdp_status fdp_stage_close(fdp_stage *stage, fdp_status status, const fdp_endpoint *readers,
                           int32_t reader_count) {
  fdp_buffer *buffer = stage->buffer;
  const fdp_endpoint *endpoint = &stage->endpoint;
  stage->buffer = NULL;
  if (!buffer) return status;
  if (status == FDP_OK) return fdp_pool_give(endpoint->pool, buffer, endpoint->stream);
  fdp_message why;
  fdp_message_keep(&why);
  for (int32_t i = 0; i < reader_count; ++i) fdp_endpoint_after(&readers[i], endpoint);
  fdp_pool_give(endpoint->pool, buffer, endpoint->stream);
  fdp_message_restore(&why);
  return status;
}
