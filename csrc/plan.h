/* Plans: what to copy where, as arrays for the kernels. Pure but for the list's own host memory:
 * any thread, no streams, no device. Views have been checked; a plan only borrows them. */
#ifndef FDP_PLAN_H
#define FDP_PLAN_H

#include "../kernels/kernels.h"
#include "view.h"

/* A list of strided copies that grows. The first few need no memory of their own. */
typedef struct fdp_copy_list {
  fdp_strided_copy *copies; /* `inline_copies`, or the heap */
  int32_t count;
  int32_t capacity;
  int64_t size_bytes; /* written by all copies */
  fdp_strided_copy inline_copies[FDP_PLAN_INLINE_COPIES];
} fdp_copy_list;

/* A list is not moved while it is in use. */
void fdp_copy_list_init(fdp_copy_list *list);
void fdp_copy_list_drop(fdp_copy_list *list);

/* Adds what copies `source` to `target`: same shape, same item size. Adjacent dimensions are
 * merged; what is contiguous on both sides becomes one plain copy (ndim 0); more than
 * FDP_COPY_MAX_DIMS merged dimensions become several copies. Nothing is added for no elements. */
fdp_status fdp_plan_copy(fdp_copy_list *list, const fdp_view *target, const fdp_view *source);

typedef enum fdp_plan_direction { FDP_PLAN_SCATTER, FDP_PLAN_GATHER } fdp_plan_direction;

/* Copies between `whole` and its consecutive slices along `dim`: out of it (scatter) or into it
 * (gather). The parts' sizes along `dim` add up to the whole's. copy_counts[i] is what part i added
 * to the list, in order. */
fdp_status fdp_plan_slices(fdp_copy_list *list, const fdp_view *whole, const fdp_view *parts,
                           int32_t part_count, int32_t dim, fdp_plan_direction direction,
                           int32_t *copy_counts);

#endif
