/* The inner loops of ref_sum.c for one instruction set; included once for each, so without a guard,
 * and as long as the code that it is.
 * The includer defines FDP_ISA(name) (the name with the set's suffix), FDP_ISA_TARGET (the
 * attribute that turns the set on), FDP_ISA_VECTOR_BYTES, and FDP_ISA_F16C if the set converts fp16
 * by itself; all are undefined again at the end.
 *
 * They are written in the compilers' generic vectors: the same text is SSE2, AVX2 or NEON, and is
 * fast at every level of optimisation. Memory is reached by memcpy, as addresses have no alignment.
 *
 * The two halves of a 32-bit word each hold one 16-bit float; they are widened as "even" and "odd"
 * without any shuffle. That needs a little-endian machine; x86-64 and aarch64 Linux are. */

#define FDP_INLINE FDP_ISA_TARGET static inline __attribute__((always_inline))
#define FDP_VECTOR __attribute__((vector_size(FDP_ISA_VECTOR_BYTES)))

typedef uint8_t FDP_ISA(u8) FDP_VECTOR;
typedef uint16_t FDP_ISA(u16) FDP_VECTOR;
typedef uint32_t FDP_ISA(u32) FDP_VECTOR;
typedef int32_t FDP_ISA(i32) FDP_VECTOR;
typedef uint64_t FDP_ISA(u64) FDP_VECTOR;
typedef float FDP_ISA(f32) FDP_VECTOR;
typedef double FDP_ISA(f64) FDP_VECTOR;

/* What one vector of a 16-bit float becomes while it is added up. */
typedef struct FDP_ISA(pair) {
  FDP_ISA(f32) even;
  FDP_ISA(f32) odd;
} FDP_ISA(pair);

FDP_INLINE FDP_ISA(u32) FDP_ISA(choose)(FDP_ISA(i32) mask, FDP_ISA(u32) yes, FDP_ISA(u32) no) {
  return ((FDP_ISA(u32))mask & yes) | (~(FDP_ISA(u32))mask & no);
}

/* ---- bf16: the upper half of an fp32 ---- */

FDP_INLINE FDP_ISA(pair) FDP_ISA(bf16_load)(const char *from) {
  FDP_ISA(u32) words;
  memcpy(&words, from, sizeof words);
  return (FDP_ISA(pair)){(FDP_ISA(f32))(words << 16), (FDP_ISA(f32))(words & 0xffff0000u)};
}

/* To nearest even, the result in the upper half; the lower half is rubbish. A NaN needs no care:
 * the lower half of a NaN made from bf16 is zero, so nothing is carried into its exponent. */
FDP_INLINE FDP_ISA(u32) FDP_ISA(bf16_round)(FDP_ISA(f32) value) {
  FDP_ISA(u32) bits = (FDP_ISA(u32))value;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

FDP_INLINE void FDP_ISA(bf16_store)(char *to, FDP_ISA(pair) sum) {
  FDP_ISA(u32) words = (FDP_ISA(bf16_round)(sum.even) >> 16) |
                       (FDP_ISA(bf16_round)(sum.odd) & 0xffff0000u);
  memcpy(to, &words, sizeof words);
}

/* ---- fp16 ---- */

#ifdef FDP_ISA_F16C

/* Here "even" is the lower and "odd" the upper eight. */
FDP_INLINE FDP_ISA(pair) FDP_ISA(f16_load)(const char *from) {
  __m128i low = _mm_loadu_si128((const __m128i_u *)from);
  __m128i high = _mm_loadu_si128((const __m128i_u *)(from + sizeof low));
  return (FDP_ISA(pair)){(FDP_ISA(f32))_mm256_cvtph_ps(low), (FDP_ISA(f32))_mm256_cvtph_ps(high)};
}

FDP_INLINE void FDP_ISA(f16_store)(char *to, FDP_ISA(pair) sum) {
  __m128i low = _mm256_cvtps_ph((__m256)sum.even, _MM_FROUND_TO_NEAREST_INT);
  __m128i high = _mm256_cvtps_ph((__m256)sum.odd, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128((__m128i_u *)to, low);
  _mm_storeu_si128((__m128i_u *)(to + sizeof low), high);
}

#else

/* `half` has the fp16 in its lower half and zeros above. */
FDP_INLINE FDP_ISA(f32) FDP_ISA(f16_widen)(FDP_ISA(u32) half) {
  const uint32_t rebias = (127 - 15) << 23;
  FDP_ISA(u32) magnitude = (half & 0x7fffu) << 13;
  FDP_ISA(u32) normal = magnitude + rebias;
  FDP_ISA(u32) special = normal + rebias; /* infinity and NaN: the exponent is all ones again */
  /* A denormal has no leading one. Give it one of weight 2^-14, then take the 2^-14 off: both
   * exact, and no operation sees an fp32 denormal, which would be slow or flushed. */
  FDP_ISA(u32) smallest = (magnitude & 0u) + ((127 - 14) << 23);
  FDP_ISA(u32) denormal =
      (FDP_ISA(u32))((FDP_ISA(f32))(magnitude + smallest) - (FDP_ISA(f32))smallest);
  FDP_ISA(i32) order = (FDP_ISA(i32))magnitude;
  FDP_ISA(u32) bits = FDP_ISA(choose)(order < (1 << 23), denormal, normal);
  bits = FDP_ISA(choose)(order >= (31 << 23), special, bits);
  return (FDP_ISA(f32))(bits | ((half & 0x8000u) << 16));
}

/* To nearest even, the result in the lower half with zeros above. */
FDP_INLINE FDP_ISA(u32) FDP_ISA(f16_round)(FDP_ISA(f32) value) {
  FDP_ISA(u32) bits = (FDP_ISA(u32))value;
  FDP_ISA(u32) magnitude = bits & 0x7fffffffu;
  FDP_ISA(i32) order = (FDP_ISA(i32))magnitude;
  FDP_ISA(u32) normal = (magnitude - ((127 - 15) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  /* Adding 0.5, whose last bit weighs 2^-24 as that of an fp16 denormal does, rounds there. */
  FDP_ISA(u32) half = (magnitude & 0u) + (126 << 23);
  FDP_ISA(u32) denormal = (FDP_ISA(u32))((FDP_ISA(f32))magnitude + (FDP_ISA(f32))half) - half;
  FDP_ISA(u32) special = FDP_ISA(choose)(value != value, (magnitude & 0u) + 0x7e00u,
                                         (magnitude & 0u) + 0x7c00u);
  FDP_ISA(u32) result = FDP_ISA(choose)(order < ((127 - 14) << 23), denormal, normal);
  result = FDP_ISA(choose)(order >= ((127 + 16) << 23), special, result);
  return result | ((bits >> 16) & 0x8000u);
}

FDP_INLINE FDP_ISA(pair) FDP_ISA(f16_load)(const char *from) {
  FDP_ISA(u32) words;
  memcpy(&words, from, sizeof words);
  return (FDP_ISA(pair)){FDP_ISA(f16_widen)(words & 0xffffu), FDP_ISA(f16_widen)(words >> 16)};
}

FDP_INLINE void FDP_ISA(f16_store)(char *to, FDP_ISA(pair) sum) {
  FDP_ISA(u32) words = FDP_ISA(f16_round)(sum.even) | (FDP_ISA(f16_round)(sum.odd) << 16);
  memcpy(to, &words, sizeof words);
}

#endif

FDP_INLINE FDP_ISA(pair) FDP_ISA(pair_add)(FDP_ISA(pair) a, FDP_ISA(pair) b) {
  return (FDP_ISA(pair)){a.even + b.even, a.odd + b.odd};
}

/* ---- lanes that are added as they are, and bool ---- */

#define FDP_PLAIN(LANE)                                                            \
  FDP_INLINE FDP_ISA(LANE) FDP_ISA(LANE##_load)(const char *from) {                \
    FDP_ISA(LANE) value;                                                           \
    memcpy(&value, from, sizeof value);                                            \
    return value;                                                                  \
  }                                                                                \
  FDP_INLINE void FDP_ISA(LANE##_store)(char *to, FDP_ISA(LANE) sum) {             \
    memcpy(to, &sum, sizeof sum);                                                  \
  }                                                                                \
  FDP_INLINE FDP_ISA(LANE) FDP_ISA(LANE##_add)(FDP_ISA(LANE) a, FDP_ISA(LANE) b) { \
    return a + b;                                                                  \
  }

FDP_PLAIN(f64)
FDP_PLAIN(f32)
FDP_PLAIN(u64)
FDP_PLAIN(u32)
FDP_PLAIN(u16)
FDP_PLAIN(u8)

FDP_INLINE FDP_ISA(u8) FDP_ISA(bool_or)(FDP_ISA(u8) a, FDP_ISA(u8) b) { return a | b; }

/* Any byte but zero is true, and true is written as one. */
FDP_INLINE void FDP_ISA(bool_store)(char *to, FDP_ISA(u8) sum) {
  FDP_ISA(u8) ones = (FDP_ISA(u8))(sum != 0) & 1;
  memcpy(to, &ones, sizeof ones);
}

/* With two sources, one pass. With more, a block at a time: sources are read two by two into totals
 * that stay in the nearest cache. A block is wholly read before it is written, so the target may be
 * any of the sources. */
#define FDP_LOOP(NAME, CELL, LOAD, ADD, STORE)                                                   \
  FDP_ISA_TARGET static void FDP_ISA(NAME)(char *target, const char *const *sources,             \
                                           int32_t source_count, size_t size_bytes) {            \
    enum { STEP = FDP_ISA_VECTOR_BYTES };                                                        \
    FDP_ISA(CELL) totals[BLOCK_BYTES / STEP];                                                    \
    for (size_t block = 0; block < size_bytes; block += BLOCK_BYTES) {                           \
      size_t left_bytes = size_bytes - block;                                                    \
      size_t count = (left_bytes < BLOCK_BYTES ? left_bytes : BLOCK_BYTES) / STEP;               \
      const char *a = sources[0] + block, *b = sources[1] + block;                               \
      char *to = target + block;                                                                 \
      if (source_count == 2) {                                                                   \
        for (size_t k = 0; k < count; k++) {                                                     \
          FDP_ISA(CELL) cell = FDP_ISA(LOAD)(a + k * STEP);                                      \
          FDP_ISA(STORE)(to + k * STEP, FDP_ISA(ADD)(cell, FDP_ISA(LOAD)(b + k * STEP)));        \
        }                                                                                        \
        continue;                                                                                \
      }                                                                                          \
      for (size_t k = 0; k < count; k++) {                                                       \
        FDP_ISA(CELL) cell = FDP_ISA(LOAD)(a + k * STEP);                                        \
        totals[k] = FDP_ISA(ADD)(cell, FDP_ISA(LOAD)(b + k * STEP));                             \
      }                                                                                          \
      int32_t i = 2;                                                                             \
      for (; i + 2 < source_count; i += 2) {                                                     \
        a = sources[i] + block;                                                                  \
        b = sources[i + 1] + block;                                                              \
        for (size_t k = 0; k < count; k++) {                                                     \
          FDP_ISA(CELL) cell = FDP_ISA(ADD)(totals[k], FDP_ISA(LOAD)(a + k * STEP));             \
          totals[k] = FDP_ISA(ADD)(cell, FDP_ISA(LOAD)(b + k * STEP));                           \
        }                                                                                        \
      }                                                                                          \
      a = sources[i] + block;                                                                    \
      b = i + 1 < source_count ? sources[i + 1] + block : NULL;                                  \
      for (size_t k = 0; k < count; k++) {                                                       \
        FDP_ISA(CELL) cell = FDP_ISA(ADD)(totals[k], FDP_ISA(LOAD)(a + k * STEP));               \
        if (b) cell = FDP_ISA(ADD)(cell, FDP_ISA(LOAD)(b + k * STEP));                           \
        FDP_ISA(STORE)(to + k * STEP, cell);                                                     \
      }                                                                                          \
    }                                                                                            \
  }

FDP_LOOP(sum_f64, f64, f64_load, f64_add, f64_store)
FDP_LOOP(sum_f32, f32, f32_load, f32_add, f32_store)
FDP_LOOP(sum_f16, pair, f16_load, pair_add, f16_store)
FDP_LOOP(sum_bf16, pair, bf16_load, pair_add, bf16_store)
FDP_LOOP(sum_u64, u64, u64_load, u64_add, u64_store)
FDP_LOOP(sum_u32, u32, u32_load, u32_add, u32_store)
FDP_LOOP(sum_u16, u16, u16_load, u16_add, u16_store)
FDP_LOOP(sum_u8, u8, u8_load, u8_add, u8_store)
FDP_LOOP(sum_bool, u8, u8_load, bool_or, bool_store)

static const fdp_sum_set FDP_ISA(set) = {
    .vector_bytes = FDP_ISA_VECTOR_BYTES,
    .loops = {[FDP_LANE_F64] = FDP_ISA(sum_f64),
              [FDP_LANE_F32] = FDP_ISA(sum_f32),
              [FDP_LANE_F16] = FDP_ISA(sum_f16),
              [FDP_LANE_BF16] = FDP_ISA(sum_bf16),
              [FDP_LANE_U64] = FDP_ISA(sum_u64),
              [FDP_LANE_U32] = FDP_ISA(sum_u32),
              [FDP_LANE_U16] = FDP_ISA(sum_u16),
              [FDP_LANE_U8] = FDP_ISA(sum_u8),
              [FDP_LANE_BOOL] = FDP_ISA(sum_bool)}};

#undef FDP_LOOP
#undef FDP_PLAIN
#undef FDP_VECTOR
#undef FDP_INLINE
#undef FDP_ISA
#undef FDP_ISA_TARGET
#undef FDP_ISA_VECTOR_BYTES
#undef FDP_ISA_F16C
