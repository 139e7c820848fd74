/* What ref_sum.c shows to its test beside the entry point of kernels.h: the sum without the
 * run-time choice of instruction set. Owns nothing, any thread, no streams. */
#ifndef FDP_REF_SUM_H
#define FDP_REF_SUM_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* fdp_ref_sum as a machine without AVX2 and F16C runs it. Its bits are the same, but for which NaN
 * a NaN is. */
int fdp_ref_sum_portable(const fdp_sum *sums, int32_t sum_count, void *stream);

#ifdef __cplusplus
}
#endif

#endif
