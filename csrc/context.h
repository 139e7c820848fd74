/* The root of all state that lives longer than a call: devices opened so far, their scratch pools,
 * the transports. One per process is enough (the Python module makes it at the first verb). Any
 * thread may call; the tables are guarded by one mutex, held only while they are looked up or
 * extended. Opening and closing do nothing to streams. */
#ifndef FDP_CONTEXT_H
#define FDP_CONTEXT_H

#include "device.h"
#include "pool.h"
#include "status.h"
#include "transport.h"
#include "view.h"

typedef struct fdp_context fdp_context;

/* Everyone who takes part in one verb, and what carries between them. */
typedef struct fdp_party {
  const fdp_transport *transport;
  fdp_endpoint home;
  fdp_endpoint others[FDP_MAX_REPLICAS];
  int32_t other_count;
} fdp_party;

fdp_status fdp_context_open(fdp_context **context);
/* Closes pools and devices. No verb may be running. */
void fdp_context_close(fdp_context *context);

/* The device of that id, opened at first use. Pinned host memory is the host device. */
fdp_status fdp_context_device(fdp_context *context, fdp_device_id id, fdp_device **device);
/* The scratch pool of a device that fdp_context_device returned. */
fdp_pool *fdp_context_pool(fdp_context *context, fdp_device *device);
/* What the scratch pools of a device hold, lent or not, of its memory and of pinned memory. */
typedef struct fdp_scratch {
  fdp_device_id id;
  int64_t device_bytes;
  int64_t pinned_bytes;
} fdp_scratch;

/* Of every device that is open; `scratch` has room for FDP_MAX_DEVICES. Gives how many there are.
 * With `trim` what is idle, and no longer in use by any stream, is given back first. */
int32_t fdp_context_scratch(fdp_context *context, bool trim, fdp_scratch *scratch);
/* Puts a device that was opened elsewhere under its id, before first use of that id: how tests
 * bring simulated devices. The context closes it, also when this fails. */
fdp_status fdp_context_adopt(fdp_context *context, fdp_device *device);
/* Everyone, and a transport that joins `home` with all `others`: the one named `wanted`; for "auto"
 * the first in order of preference; for NULL the one that FASTDP_TRANSPORT asks for if all are
 * GPUs, else the first. FDP_UNSUPPORTED, with what is missing, when the one asked for does not join
 * them. A pair of GPUs that was never joined before is looked at first (peer_check.h), which takes
 * a moment. The time of a deadline (deadline.h) begins. `streams` may be NULL, or hold NULL: the
 * device's default stream. other_count is 1 to FDP_MAX_REPLICAS (checked by the verb). */
fdp_status fdp_context_party(fdp_context *context, const char *wanted, fdp_device_id home,
                             fdp_stream *home_stream, const fdp_device_id *others,
                             fdp_stream *const *streams, int32_t other_count, fdp_party *party);
/* The name of the transport that this would be, and why: "local: cuda:0 and cuda:1 are different
 * memories" is why it is peer. At most `reason_bytes` are written. */
fdp_status fdp_context_transport(fdp_context *context, const char *wanted, fdp_device_id home,
                                 const fdp_device_id *others, int32_t other_count,
                                 const char **name, char *reason, size_t reason_bytes);
/* The name of a transport, or "auto", as the environment table has it, which lives for ever; `name`
 * may go. FDP_INVALID_ARGUMENT for any other text. */
fdp_status fdp_context_transport_name(const char *name, const char **found);

#endif
