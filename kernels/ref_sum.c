/* Sums in plain C, of any number of sources in their order: the engine of the CPU backend and the
 * oracle of sum.cu. The loops are in ref_sum_loops.h, once for the machine every compiler assumes
 * and once for AVX2 with F16C, chosen at run time by plain branches (an ifunc would run before the
 * sanitizers do). It owns nothing, any thread may call, and all work is done before a call
 * returns. */
#include "ref_sum.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

/* Clang and older GCCs cannot ask for F16C at run time: they build the portable set alone. */
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define FDP_HAVE_AVX2 1
#include <immintrin.h>
#endif

/* How an element is added up; a complex number is two elements. Signed integers are added as
 * unsigned ones: the same bits, and wrapping is defined. */
typedef enum fdp_lane {
  FDP_LANE_F64,
  FDP_LANE_F32,
  FDP_LANE_F16,
  FDP_LANE_BF16,
  FDP_LANE_U64,
  FDP_LANE_U32,
  FDP_LANE_U16,
  FDP_LANE_U8,
  FDP_LANE_BOOL,
  FDP_LANE_COUNT
} fdp_lane;

/* Adds up whole vectors of two or more sources: `size_bytes` is a multiple of the set's
 * vector_bytes. The target may be one of the sources. */
typedef void (*fdp_sum_loop)(char *target, const char *const *sources, int32_t source_count,
                             size_t size_bytes);

typedef struct fdp_sum_set {
  size_t vector_bytes;
  fdp_sum_loop loops[FDP_LANE_COUNT];
} fdp_sum_set;

/* A block is short on purpose: with 8 KB the machine's prefetching lost the sources between two
 * blocks, and many sources ran at half the speed. */
enum { MAX_VECTOR_BYTES = 32, BLOCK_BYTES = 1024 };

#define FDP_ISA(name) name##_portable
#define FDP_ISA_TARGET
#define FDP_ISA_VECTOR_BYTES 16
#include "ref_sum_loops.h"

#ifdef FDP_HAVE_AVX2
#define FDP_ISA(name) name##_avx2
#define FDP_ISA_TARGET __attribute__((target("avx2,f16c")))
#define FDP_ISA_VECTOR_BYTES 32
#define FDP_ISA_F16C 1
#include "ref_sum_loops.h"
#endif

static const fdp_sum_set *best_set(void) {
#ifdef FDP_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &set_avx2;
#endif
  return &set_portable;
}

/* The lane of a dtype and the bytes of one lane. */
static fdp_lane lane_of(fdp_dtype dtype, size_t *lane_bytes, int64_t *lanes_per_elem) {
  assert(dtype.lanes == 1);
  bool is_complex = dtype.code == FDP_CODE_COMPLEX;
  *lanes_per_elem = is_complex ? 2 : 1;
  *lane_bytes = (is_complex ? dtype.bits / 2u : dtype.bits) / 8u;
  switch (dtype.code) {
    case FDP_CODE_BOOL: return FDP_LANE_BOOL;
    case FDP_CODE_BFLOAT: return FDP_LANE_BF16;
    case FDP_CODE_COMPLEX:
    case FDP_CODE_FLOAT:
      return *lane_bytes == 8 ? FDP_LANE_F64 : *lane_bytes == 4 ? FDP_LANE_F32 : FDP_LANE_F16;
    default:
      assert(dtype.code == FDP_CODE_INT || dtype.code == FDP_CODE_UINT);
      return *lane_bytes == 8   ? FDP_LANE_U64
             : *lane_bytes == 4 ? FDP_LANE_U32
             : *lane_bytes == 2 ? FDP_LANE_U16
                                : FDP_LANE_U8;
  }
}

/* What is left after the whole vectors, through buffers of one vector: so the end of an array is
 * added up by the very loop that did its beginning. */
static void sum_tail(const fdp_sum_set *set, fdp_lane lane, char *target,
                     const char *const *sources, int32_t source_count, size_t size_bytes) {
  char vectors[FDP_MAX_REPLICAS][MAX_VECTOR_BYTES];
  const char *padded[FDP_MAX_REPLICAS];
  char result[MAX_VECTOR_BYTES];
  assert(set->vector_bytes <= MAX_VECTOR_BYTES && size_bytes < set->vector_bytes);
  for (int32_t i = 0; i < source_count; i++) {
    memcpy(vectors[i], sources[i], size_bytes);
    memset(vectors[i] + size_bytes, 0, set->vector_bytes - size_bytes);
    padded[i] = vectors[i];
  }
  set->loops[lane](result, padded, source_count, set->vector_bytes);
  memcpy(target, result, size_bytes);
}

static void sum_one(const fdp_sum_set *set, const fdp_sum *sum) {
  assert(sum->source_count >= 1 && sum->source_count <= FDP_MAX_REPLICAS);
  assert(sum->count_elems >= 0);
  size_t lane_bytes;
  int64_t lanes_per_elem;
  fdp_lane lane = lane_of(sum->dtype, &lane_bytes, &lanes_per_elem);
  size_t size_bytes = (size_t)(sum->count_elems * lanes_per_elem) * lane_bytes;
  if (size_bytes == 0) return;

  const char *sources[FDP_MAX_REPLICAS];
  int32_t source_count = 0;
  for (int32_t i = 0; i < sum->source_count; i++) {
    if (sum->sources[i] != NULL) sources[source_count++] = sum->sources[i];
  }
  if (source_count == 0) {
    memset(sum->target, 0, size_bytes);
    return;
  }
  if (source_count == 1) {
    if (sources[0] != sum->target) memcpy(sum->target, sources[0], size_bytes);
    return;
  }
  size_t tail_bytes = size_bytes % set->vector_bytes;
  size_t whole_bytes = size_bytes - tail_bytes;
  set->loops[lane](sum->target, sources, source_count, whole_bytes);
  if (tail_bytes == 0) return;
  for (int32_t i = 0; i < source_count; i++) sources[i] += whole_bytes;
  sum_tail(set, lane, (char *)sum->target + whole_bytes, sources, source_count, tail_bytes);
}

int fdp_ref_sum(const fdp_sum *sums, int32_t sum_count, void *stream) {
  (void)stream;
  assert(sum_count >= 0);
  const fdp_sum_set *set = best_set();
  for (int32_t i = 0; i < sum_count; i++) sum_one(set, &sums[i]);
  return 0;
}

int fdp_ref_sum_portable(const fdp_sum *sums, int32_t sum_count, void *stream) {
  (void)stream;
  assert(sum_count >= 0);
  for (int32_t i = 0; i < sum_count; i++) sum_one(&set_portable, &sums[i]);
  return 0;
}
