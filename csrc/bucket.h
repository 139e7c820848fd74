/* A bucket: many tensors of one dtype with one flat buffer, so that a step moves few large pieces
 * instead of many small ones. The struct is a plan only (slots, no memory); it is made once for a
 * list of tensors and used every step, by any thread, since nothing writes to it. The layout part
 * is pure; the two verbs enqueue. */
#ifndef FDP_BUCKET_H
#define FDP_BUCKET_H

#include "context.h"

typedef struct fdp_bucket fdp_bucket;

/* Lays out one slot for each prototype, in order, each at a multiple of FDP_ALIGNMENT_BYTES. A slot
 * keeps its prototype's shape; its strides are the prototype's when that is dense
 * (fdp_view_is_dense), else row-major. All prototypes have one dtype. Only shape, strides and dtype
 * of a prototype are read, never its data. `offsets_elems`, unless NULL, says where the slots begin
 * instead, none before the one before it ends. */
fdp_status fdp_bucket_open(const fdp_view *prototypes, const int64_t *offsets_elems, int32_t count,
                           fdp_bucket **bucket);
void fdp_bucket_close(fdp_bucket *bucket);

/* Its verbs are carried by the transport of that name, or by the first that fits ("auto"), whatever
 * FASTDP_TRANSPORT says. Before its first verb. FDP_INVALID_ARGUMENT for a name that is none. */
fdp_status fdp_bucket_demand(fdp_bucket *bucket, const char *transport);

/* By which records (recorder.h) name it: counted from 1 as buckets are opened. */
int32_t fdp_bucket_number(const fdp_bucket *bucket);
int32_t fdp_bucket_count(const fdp_bucket *bucket);
/* Size that a flat buffer must have, the gaps between slots included. */
int64_t fdp_bucket_size_bytes(const fdp_bucket *bucket);
int64_t fdp_bucket_offset_bytes(const fdp_bucket *bucket, int32_t index);
/* The slot as a view on `flat_data`. */
fdp_view fdp_bucket_slot(const fdp_bucket *bucket, int32_t index, void *flat_data,
                         fdp_device_id device);

/* Copies sources[0..count) into the slots of every flat buffer. Source k has slot k's shape and
 * dtype, any strides. flats[i] is a contiguous one-dimensional view of the bucket's dtype and at
 * least fdp_bucket_size_bytes; gaps may hold anything afterwards. All sources lie on one device.
 * Reads sources on home_stream; writes flats[i] on flat_streams[i]; afterwards home_stream waits
 * for the reads. */
fdp_status fdp_bucket_broadcast(fdp_context *context, const fdp_bucket *bucket,
                                const fdp_view *sources, fdp_stream *home_stream,
                                const fdp_view *flats, fdp_stream *const *flat_streams,
                                int32_t flat_count);

/* Slot k of `flat` becomes the sum over ranks r of gradients[r * count + k], in rank order. A NULL
 * entry counts as zero; a slot with no gradient at all becomes zero. Gradient (r, k) has slot k's
 * shape and dtype, any strides (zero strides included); all of one rank lie on one device. Gaps may
 * hold anything afterwards. Sums as fdp_reduce. Reads rank r's on rank_streams[r]; writes flat on
 * flat_stream; afterwards each rank's stream waits for its reads. The stream of a rank without any
 * gradient is left alone. */
fdp_status fdp_bucket_reduce(fdp_context *context, const fdp_bucket *bucket,
                             const fdp_view *const *gradients, fdp_stream *const *rank_streams,
                             int32_t rank_count, const fdp_view *flat, fdp_stream *flat_stream);

#endif
