#include "device.h"

#include "fault.h"

fdp_status fdp_device_memory_take(fdp_device *device, size_t size_bytes, void **address) {
  fdp_status status = fdp_fault_check(FDP_FAULT_MEMORY_TAKE);
  if (status != FDP_OK) return status;
  return device->ops->memory_take(device, size_bytes, address);
}

fdp_status fdp_device_pinned_take(fdp_device *device, size_t size_bytes, void **address) {
  fdp_status status = fdp_fault_check(FDP_FAULT_MEMORY_TAKE);
  if (status != FDP_OK) return status;
  return device->ops->pinned_take(device, size_bytes, address);
}
