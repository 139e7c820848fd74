/* Every fixed bound of the core in one place, so it is as long as there are bounds. A test build
 * may shrink a bound by defining it on the compiler's command line (STYLE.md 24); nothing else
 * may. */
#ifndef FDP_LIMITS_H
#define FDP_LIMITS_H

/* Dimensions of a view as it comes in: what torch and NumPy 2 allow. */
#ifndef FDP_MAX_DIMS
#define FDP_MAX_DIMS 64
#endif

/* Dimensions a kernel handles in one launch, after adjacent dimensions were merged. */
#ifndef FDP_COPY_MAX_DIMS
#define FDP_COPY_MAX_DIMS 8
#endif

/* Replicas of one call, a device listed several times counted each time. */
#ifndef FDP_MAX_REPLICAS
#define FDP_MAX_REPLICAS 64
#endif

/* Devices that one context opens: more than any machine has. */
#define FDP_MAX_DEVICES 64

/* Alignment of every pool buffer, and of every slot of a bucket whose place is not given, in bytes:
 * a cache line, and enough for the 16-byte accesses of the kernels. */
#ifndef FDP_ALIGNMENT_BYTES
#define FDP_ALIGNMENT_BYTES 64
#endif

/* Longest error message, terminating zero included. */
#ifndef FDP_MESSAGE_BYTES
#define FDP_MESSAGE_BYTES 1024
#endif

/* Unused scratch memory that the pool of one device keeps before it gives some back: what was not
 * taken while that many other buffers came back, a training step or more. A model whose step needs
 * more scratch than the bound keeps all of it. */
#ifndef FDP_POOL_IDLE_BYTES
#define FDP_POOL_IDLE_BYTES (INT64_C(1) << 30)
#endif
#ifndef FDP_POOL_STALE_GIVES
#define FDP_POOL_STALE_GIVES 4096
#endif

/* Scratch buffers of one size that a transport keeps in flight before it waits for one; of those
 * above the second bound, which are a model's largest tensor or so, it keeps one. */
#ifndef FDP_POOL_DEPTH
#define FDP_POOL_DEPTH 3
#endif
#ifndef FDP_POOL_DEEP_BYTES
#define FDP_POOL_DEEP_BYTES (INT64_C(64) << 20)
#endif

/* From this size up a bucket between three or more GPUs is cut into shards (peer_leads.h):
 * below it one more hop costs more than the home's link does. */
#ifndef FDP_PEER_SHARDED_BYTES
#define FDP_PEER_SHARDED_BYTES (INT64_C(512) << 10)
#endif

/* Up to this size two GPUs move data by a kernel that reads the other's memory: a copy engine needs
 * 14 us to start (two H200), a kernel 4, and its launch costs the host less. Above it the kernel
 * would keep multiprocessors busy for long. */
#ifndef FDP_PEER_DIRECT_BYTES
#define FDP_PEER_DIRECT_BYTES (INT64_C(16) << 20)
#endif

/* From this size up gradients are read where they lie, without scratch (peer_sum.c, note "in
 * place"): those of a bucket of one tensor, or of several of this mean size. Smaller ones lie
 * scattered over many pages, which their own GPU reads faster than another one over a link: it
 * packs them. The mean size was not measured. */
#ifndef FDP_PEER_STAY_BYTES
#define FDP_PEER_STAY_BYTES (INT64_C(1) << 20)
#endif
#ifndef FDP_PEER_STAY_MEAN_BYTES
#define FDP_PEER_STAY_MEAN_BYTES (INT64_C(64) << 10)
#endif

/* From this size up the gradient of a bucket of one tensor is copied to home before it is summed
 * (peer_sum.c, note "fetched tensors"). Where home is later than the other GPU the copy is hidden;
 * where it is not, the start of a copy engine and the sum of the last chunk come on top, and of a
 * smaller tensor that is more. (154 MB, two H200: the copy takes 386 us and the sum behind it 110,
 * a sum over the link 421.) It takes scratch on home, as large as the bucket's broadcast does. */
#ifndef FDP_PEER_FETCH_BYTES
#define FDP_PEER_FETCH_BYTES (INT64_C(32) << 20)
#endif
/* In chunks of this size, or larger ones if there would be more than that many: each costs the host
 * four calls. */
#ifndef FDP_PEER_FETCH_CHUNK_BYTES
#define FDP_PEER_FETCH_CHUNK_BYTES (INT64_C(32) << 20)
#endif
#ifndef FDP_PEER_FETCH_CHUNKS
#define FDP_PEER_FETCH_CHUNKS 8
#endif

/* Up to this size each of three or more GPUs pulls the shards of a bucket by one kernel, for the
 * same reasons: by copy engines n GPUs make (n - 1)^2 copies of it. Not measured: no machine had
 * three. */
#ifndef FDP_PEER_GATHERED_BYTES
#define FDP_PEER_GATHERED_BYTES (INT64_C(16) << 20)
#endif

/* Chunk in which a larger bucket passes between two GPUs (peer_leads.h), and how many there are at
 * most: each costs the host some launches. */
#ifndef FDP_PEER_CHUNK_BYTES
#define FDP_PEER_CHUNK_BYTES (INT64_C(256) << 20)
#endif
#ifndef FDP_PEER_MAX_CHUNKS
#define FDP_PEER_MAX_CHUNKS 16
#endif

/* Piece in which a large copy passes through pinned memory: one is sent while the next arrives. */
#ifndef FDP_RELAY_CHUNK_BYTES
#define FDP_RELAY_CHUNK_BYTES (INT64_C(2) << 20)
#endif

/* The largest of the copies by which two peers are checked. */
#ifndef FDP_PEER_CHECK_BYTES
#define FDP_PEER_CHECK_BYTES (INT64_C(1) << 20)
#endif

/* How long the pattern check of two peers may take before they count as stalled. */
#ifndef FDP_PEER_CHECK_TIMEOUT_MS
#define FDP_PEER_CHECK_TIMEOUT_MS 20000
#endif

/* How long NCCL may take to make communicators, to connect them or to end them. */
#ifndef FDP_NCCL_TIMEOUT_MS
#define FDP_NCCL_TIMEOUT_MS 120000
#endif

/* Strided copies that a plan holds without memory of its own. */
#ifndef FDP_PLAN_INLINE_COPIES
#define FDP_PLAN_INLINE_COPIES 4
#endif

/* Records that the flight recorder keeps; a power of two. */
#ifndef FDP_RECORDER_LENGTH
#define FDP_RECORDER_LENGTH 256
#endif

/* Deadline of a wait on the host when FASTDP_TIMEOUT_MS is not set. */
#ifndef FDP_DEFAULT_TIMEOUT_MS
#define FDP_DEFAULT_TIMEOUT_MS 600000
#endif

#endif
