#include "transport.h"

#include "relay.h"

/* More plain copies than this are quicker in one launch than one by one. */
#define MAX_SINGLE_COPIES 8

fdp_status fdp_endpoint_copy(const fdp_endpoint *endpoint, const fdp_strided_copy *copies,
                             int32_t copy_count) {
  fdp_device *device = endpoint->device;
  if (copy_count == 0) return FDP_OK;
  if (copy_count > MAX_SINGLE_COPIES || !fdp_relay_is_plain(copies, copy_count)) {
    return device->ops->copy_strided(device, endpoint->stream, copies, copy_count);
  }
  fdp_status status = FDP_OK;
  for (int32_t i = 0; i < copy_count; ++i) {
    FDP_TRY(device->ops->copy(device, endpoint->stream, copies[i].target, copies[i].source,
                              copies[i].item_bytes));
  }
done:
  return status;
}

fdp_status fdp_endpoint_settle(const fdp_endpoint *first, const fdp_endpoint *then,
                               fdp_status status) {
  fdp_message why;
  fdp_message_keep(&why);
  fdp_endpoint_after(first, then);
  fdp_message_restore(&why);
  return status;
}
