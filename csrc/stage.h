/* A stage: scratch on one endpoint into which views are copied, so that they have the layout that a
 * transport asks for. Views are added, then one call enqueues all copies on the endpoint's stream.
 * The buffer is lent by the endpoint's pool and goes back with fdp_stage_close, once everything
 * that reads it is ordered before the endpoint's stream. One thread. */
#ifndef FDP_STAGE_H
#define FDP_STAGE_H

#include "plan.h"
#include "transport.h"

typedef struct fdp_stage {
  fdp_endpoint endpoint;
  fdp_buffer *buffer; /* NULL until fdp_stage_open took one */
} fdp_stage;

/* Bytes that a view of `size_bytes` takes up in a stage. */
int64_t fdp_stage_room_bytes(int64_t size_bytes);
fdp_status fdp_stage_open(fdp_stage *stage, const fdp_endpoint *endpoint, int64_t size_bytes);
/* Plans the copy of `source` to `*used_bytes` of the stage, with the layout of the dense view
 * `layout`; moves used_bytes on and returns the address. */
fdp_status fdp_stage_plan(const fdp_stage *stage, fdp_copy_list *list, const fdp_view *source,
                          const fdp_view *layout, int64_t *used_bytes, void **address);
fdp_status fdp_stage_run(const fdp_stage *stage, const fdp_copy_list *list);
/* Gives the buffer back and returns `status`, which the work with it came to, or the failure to
 * give back. After a failure, `readers` may still be reading: the endpoint's stream waits for them
 * first, as far as that goes. Safe on a stage that is all zeros. */
fdp_status fdp_stage_close(fdp_stage *stage, fdp_status status, const fdp_endpoint *readers,
                           int32_t reader_count);

#endif
