/* The entry points of the kernels, once in plain C (ref.c, prefix fdp_ref_) and once in CUDA (*.cu,
 * prefix fdp_cuda_). A launcher asserts its assumptions, enqueues on `stream` (ref.c runs at once
 * and ignores it) and returns 0, or the runtime's error code. The argument arrays are read before
 * the launcher returns. The items of one call (copies, segments, sums) are independent: they run in
 * no order. No kernel knows of buckets, devices or Python. Same input, same bits: sums run in
 * source order, with no float atomics. */
#ifndef FDP_KERNELS_H
#define FDP_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "../csrc/dtype.h"
#include "../csrc/limits.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copy of a strided array of items. Strides are in bytes and may be zero (source only) or
 * negative. Items are moved as bytes: item_bytes may be any positive number, and merged inner
 * dimensions make it large; when ndim is 0 it is one plain copy of item_bytes. */
typedef struct fdp_strided_copy {
  void *target;
  const void *source;
  int64_t item_bytes;
  int32_t ndim; /* 0 to FDP_COPY_MAX_DIMS; outermost first */
  int64_t shape[FDP_COPY_MAX_DIMS];
  int64_t target_strides_bytes[FDP_COPY_MAX_DIMS];
  int64_t source_strides_bytes[FDP_COPY_MAX_DIMS];
} fdp_strided_copy;

/* One tensor's place in a flat buffer. Pack: tensor == NULL fills the slot with zeros. Unpack:
 * tensor == NULL skips it. Bytes of the flat buffer between slots are left alone. */
typedef struct fdp_segment {
  void *tensor;
  int64_t offset_bytes; /* in the flat buffer */
  int64_t size_bytes;
} fdp_segment;

/* target[k] = sources[0][k] + sources[1][k] + ... in this order. A NULL source counts as zero; with
 * none but NULL sources the target becomes zero. fp16 and bf16 are added up in fp32 and rounded
 * once; integers wrap; bool is "or". The target may be one of the sources, else they are disjoint.
 * With exactly one source that is not NULL the bits are copied: -0.0 and NaN stay as they are. With
 * more, NULL ones are left out, so that two -0.0 and a NULL make -0.0. `over_link`: some source is
 * another GPU's memory, so the launch is kept small: threads that wait for a link keep the
 * multiprocessors from compute that runs beside. */
typedef struct fdp_sum {
  void *target;
  const void *const *sources; /* source_count pointers */
  int32_t source_count;       /* 1 to FDP_MAX_REPLICAS */
  int64_t count_elems;
  fdp_dtype dtype; /* fdp_dtype_can_sum */
  bool over_link;
} fdp_sum;

int fdp_ref_copy_strided(const fdp_strided_copy *copies, int32_t copy_count, void *stream);
int fdp_ref_pack(void *flat, const fdp_segment *segments, int32_t segment_count, void *stream);
int fdp_ref_unpack(const void *flat, const fdp_segment *segments, int32_t segment_count,
                   void *stream);
int fdp_ref_sum(const fdp_sum *sums, int32_t sum_count, void *stream);

#ifdef FDP_WITH_CUDA
int fdp_cuda_copy_strided(const fdp_strided_copy *copies, int32_t copy_count, void *stream);
int fdp_cuda_pack(void *flat, const fdp_segment *segments, int32_t segment_count, void *stream);
int fdp_cuda_unpack(const void *flat, const fdp_segment *segments, int32_t segment_count,
                    void *stream);
int fdp_cuda_sum(const fdp_sum *sums, int32_t sum_count, void *stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
