#include "fake_gpu.h"

#include <dlfcn.h>
#include <stdio.h>

#include "check.h"

static const fake_nccl_table *fake;
static const fdp_device_ops *base; /* of the devices wrapped last */
static fdp_device_ops wrapped;

const fake_nccl_table *fake_nccl_get(void) {
  if (fake) return fake;
  void *handle = dlopen(FAKE_NCCL_PATH, RTLD_NOW | RTLD_LOCAL);
  fake = handle ? dlsym(handle, "fake_nccl") : NULL;
  if (fake) fake->set_spare(check_spare_allocations);
  if (!fake) fprintf(stderr, "%s: %s\n", FAKE_NCCL_PATH, dlerror());
  return fake;
}

static void refuse_in_group(const char *what) {
  if (fake->depth() > 0) fake->violate(what);
}

static fdp_status make_current(fdp_device *device) {
  fake->set_current(device);
  return FDP_OK;
}

static fdp_status memory_take(fdp_device *device, size_t size_bytes, void **address) {
  refuse_in_group("memory taken inside a group");
  return base->memory_take(device, size_bytes, address);
}

static void memory_drop(fdp_device *device, void *address) {
  refuse_in_group("memory dropped inside a group");
  base->memory_drop(device, address);
}

static fdp_status event_synchronize(fdp_device *device, fdp_event *event, int64_t timeout_ms,
                                    const volatile int *abort_flag) {
  refuse_in_group("a host wait inside a group");
  return base->event_synchronize(device, event, timeout_ms, abort_flag);
}

void fake_gpu_wrap(fdp_device *device) {
  fake_nccl_get();
  base = device->ops;
  wrapped = *base;
  wrapped.make_current = make_current;
  wrapped.memory_take = memory_take;
  wrapped.memory_drop = memory_drop;
  wrapped.event_synchronize = event_synchronize;
  device->ops = &wrapped;
}

void fake_gpu_finish(void) {
  fake_nccl_counts counts = fake->read();
  CHECK_EQUAL(counts.violations, 0);
  CHECK_TEXT(counts.violation, "");
  CHECK_EQUAL(counts.made, counts.destroyed + counts.aborted);
  fake->reset();
}
