/* Tests of kernels/ref.c and ref_sum.c against oracles that share no code with them: 16-bit floats
 * are found by searching the table of all their values, sums are made one element at a time,
 * strided copies walk every index. Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../kernels/ref_sum.h"
#include "cases.h"

static int passed, failed;

static void check(bool ok, const char *what, int64_t a, int64_t b, int64_t c) {
  if (ok) {
    passed++;
  } else if (failed++ < 20) {
    printf("FAILED %s (%lld, %lld, %lld)\n", what, (long long)a, (long long)b, (long long)c);
  }
}

/* ---- 16-bit floats, slowly ---- */

typedef struct format {
  int exponent_bits, mantissa_bits, bias;
  double values[32768]; /* by magnitude bits; what comes after the largest stands for infinity */
} format;

static format fp16 = {5, 10, 15, {0}};
static format bf16 = {8, 7, 127, {0}};

static void format_fill(format *f) {
  for (int h = 0; h < 32768; h++) {
    int exponent = h >> f->mantissa_bits, mantissa = h & ((1 << f->mantissa_bits) - 1);
    if (exponent > 0) mantissa += 1 << f->mantissa_bits;
    f->values[h] = ldexp(mantissa, (exponent > 0 ? exponent : 1) - f->bias - f->mantissa_bits);
  }
}

static int format_infinity(const format *f) {
  return ((1 << f->exponent_bits) - 1) << f->mantissa_bits;
}

static float format_decode(const format *f, unsigned bits) {
  int h = bits & 0x7fff, infinity = format_infinity(f);
  float value = h > infinity ? NAN : h == infinity ? INFINITY : (float)f->values[h];
  return bits & 0x8000 ? -value : value;
}

static unsigned format_encode(const format *f, float value) {
  int infinity = format_infinity(f), low = 0, high = infinity;
  unsigned sign = signbit(value) ? 0x8000 : 0;
  double x = fabs((double)value);
  if (isnan(value)) return (unsigned)infinity + 1;
  if (x >= f->values[infinity]) return sign | (unsigned)infinity;
  while (high - low > 1) { /* values[low] <= x < values[high] */
    int middle = (low + high) / 2;
    if (f->values[middle] <= x) low = middle; else high = middle;
  }
  double down = x - f->values[low], up = f->values[high] - x;
  bool take_low = down < up || (down == up && low % 2 == 0);
  return sign | (unsigned)(take_low ? low : high);
}

/* ---- sums, one element at a time ---- */

#define ADD_UP(TYPE, OP)                              \
  do {                                                \
    TYPE total, next;                                 \
    memcpy(&total, parts[0], sizeof total);           \
    for (int32_t i = 1; i < count; i++) {             \
      memcpy(&next, parts[i], sizeof next);           \
      total = (TYPE)(total OP next);                  \
    }                                                 \
    memcpy(out, &total, sizeof total);                \
  } while (0)

static void oracle_half(const format *f, const char **parts, int32_t count, char *out) {
  uint16_t bits;
  memcpy(&bits, parts[0], 2);
  float total = format_decode(f, bits);
  for (int32_t i = 1; i < count; i++) {
    memcpy(&bits, parts[i], 2);
    total += format_decode(f, bits);
  }
  bits = (uint16_t)format_encode(f, total);
  memcpy(out, &bits, 2);
}

static void oracle_part(fdp_dtype_code code, int64_t bytes, const char **parts, int32_t count,
                        char *out) {
  if (count == 0) {
    memset(out, 0, (size_t)bytes);
  } else if (count == 1) {
    memcpy(out, parts[0], (size_t)bytes);
  } else if (code == FDP_CODE_BOOL) {
    ADD_UP(uint8_t, ||);
  } else if (code == FDP_CODE_BFLOAT || (code == FDP_CODE_FLOAT && bytes == 2)) {
    oracle_half(code == FDP_CODE_BFLOAT ? &bf16 : &fp16, parts, count, out);
  } else if (code == FDP_CODE_FLOAT) {
    if (bytes == 8) ADD_UP(double, +); else ADD_UP(float, +);
  } else {
    switch (bytes) {
      case 1: ADD_UP(uint8_t, +); break;
      case 2: ADD_UP(uint16_t, +); break;
      case 4: ADD_UP(uint32_t, +); break;
      default: ADD_UP(uint64_t, +);
    }
  }
}

static void oracle_sum(const case_dtype *type, char *target, const char *const *sources,
                       int32_t source_count, int64_t count_elems) {
  bool is_complex = type->dtype.code == FDP_CODE_COMPLEX;
  fdp_dtype_code code = is_complex ? FDP_CODE_FLOAT : (fdp_dtype_code)type->dtype.code;
  int64_t bytes = type->elem_bytes / (is_complex ? 2 : 1);
  for (int64_t k = 0; k < count_elems * (is_complex ? 2 : 1); k++) {
    const char *parts[FDP_MAX_REPLICAS];
    int32_t count = 0;
    for (int32_t i = 0; i < source_count; i++) {
      if (sources[i] != NULL) parts[count++] = sources[i] + k * bytes;
    }
    oracle_part(code, bytes, parts, count, target + k * bytes);
  }
}

typedef int (*sum_function)(const fdp_sum *, int32_t, void *);
static const sum_function sum_functions[] = {fdp_ref_sum, fdp_ref_sum_portable};

/* ---- every 16-bit value ---- */

static void check_halves(const case_dtype *type, const uint16_t *const *sources, int32_t count,
                         const char *what) {
  static uint16_t got[65536], wanted[65536];
  const void *addresses[3] = {sources[0], sources[1], count > 2 ? sources[2] : NULL};
  oracle_sum(type, (char *)wanted, (const char *const *)addresses, count, 65536);
  for (int f = 0; f < 2; f++) {
    fdp_sum sum = {got, addresses, count, 65536, type->dtype, false};
    memset(got, 0xa5, sizeof got);
    sum_functions[f](&sum, 1, NULL);
    check(case_difference(type, got, wanted, 65536) < 0, what, f, type->dtype.code,
          case_difference(type, got, wanted, 65536));
  }
}

static void test_every_half(const case_dtype *type, const format *f) {
  static uint16_t all[65536], other[65536], third[65536];
  const uint16_t *sources[] = {all, other, third};
  unsigned infinity = (unsigned)format_infinity(f);
  const unsigned partners[] = {0,          0x8000,   1,      0x8001, infinity, infinity | 0x8000,
                               infinity + 1, 0x7fff, 0xffff, infinity - 1, infinity | 0x7fff,
                               1u << f->mantissa_bits, (1u << f->mantissa_bits) - 1};
  for (int k = 0; k < 65536; k++) all[k] = (uint16_t)k;
  for (size_t p = 0; p < sizeof partners / sizeof partners[0] + 30; p++) {
    bool fixed = p < sizeof partners / sizeof partners[0];
    for (int k = 0; k < 65536; k++) {
      other[k] = (uint16_t)(fixed ? partners[p] : case_bits());
    }
    check_halves(type, sources, 2, "every 16-bit value plus one");
  }
  for (int k = 0; k < 65536; k++) other[k] = 0x8000; /* x + -0.0 is x */
  for (int g = 0; g < 2; g++) {
    const void *addresses[] = {all, other};
    fdp_sum sum = {third, addresses, 2, 65536, type->dtype, false};
    sum_functions[g](&sum, 1, NULL);
    check(case_difference(type, third, all, 65536) < 0, "there and back", g, 0, 0);
  }
  /* The middle between each value and the next, and a little to both sides of it. */
  for (int nudge = -1; nudge <= 1; nudge++) {
    for (int k = 0; k < 65536; k++) {
      int exponent = (k & 0x7fff) >> f->mantissa_bits;
      float ulp = ldexpf(1, (exponent > 0 ? exponent : 1) - f->bias - f->mantissa_bits);
      float sign = k & 0x8000 ? -1 : 1;
      other[k] = (uint16_t)format_encode(f, sign * ulp / 2);
      third[k] = (uint16_t)format_encode(f, (float)nudge * ulp / 1024);
    }
    check_halves(type, sources, 3, "the middle between two 16-bit values");
  }
}

/* ---- sums as a product of cases ---- */

enum { GUARD_BYTES = 64, MAX_SUM_BYTES = 16 * 20011 + 3 * GUARD_BYTES };

typedef struct sum_case {
  const case_dtype *type;
  int64_t count_elems;
  int32_t source_count;
  int64_t misaligned_bytes;
  int32_t target_is; /* the source that is the target; -1 for none */
  int nulls;         /* 0 none, 1 some, 2 all */
  bool exact;
} sum_case;

/* A small integer in any dtype. */
static void encode_integer(const case_dtype *type, int64_t value, char *out) {
  fdp_dtype_code code = (fdp_dtype_code)type->dtype.code;
  bool is_complex = code == FDP_CODE_COMPLEX;
  int64_t bytes = type->elem_bytes / (is_complex ? 2 : 1);
  for (int part = 0; part < (is_complex ? 2 : 1); part++, out += bytes, value = -value) {
    double wide = (double)value;
    float narrow = (float)value;
    uint16_t half = (uint16_t)format_encode(code == FDP_CODE_BFLOAT ? &bf16 : &fp16, narrow);
    const void *from = code == FDP_CODE_INT || code == FDP_CODE_UINT ? (const void *)&value
                       : bytes == 8 ? (const void *)&wide
                       : bytes == 4 ? (const void *)&narrow : (const void *)&half;
    uint8_t truth = value != 0;
    memcpy(out, code == FDP_CODE_BOOL ? &truth : from, (size_t)bytes);
  }
}

static void run_sum_case(const sum_case *c, sum_function sum_of) {
  static char *memory[FDP_MAX_REPLICAS + 1], *wanted;
  const char *sources[FDP_MAX_REPLICAS], *before[FDP_MAX_REPLICAS];
  int64_t size_bytes = c->count_elems * c->type->elem_bytes;
  int64_t place = GUARD_BYTES + c->misaligned_bytes;
  for (int32_t i = 0; i <= c->source_count; i++) {
    if (memory[i] == NULL) memory[i] = malloc(MAX_SUM_BYTES);
    if (i < c->source_count) sources[i] = memory[i] + place;
  }
  if (wanted == NULL) wanted = malloc(MAX_SUM_BYTES);
  char *target = memory[c->source_count] + place;
  for (int32_t i = 0; i < c->source_count; i++) {
    case_fill((char *)sources[i], size_bytes);
    for (int64_t k = 0; k < c->count_elems && c->exact; k++) {
      char *elem = (char *)sources[i] + k * c->type->elem_bytes;
      encode_integer(c->type, (i * 7 + k * 3) % 11 - 5, elem);
    }
    before[i] = sources[i];
    if (c->nulls == 2 || (c->nulls == 1 && i != c->target_is && case_below(2))) before[i] = NULL;
  }
  if (c->target_is >= 0 && before[c->target_is] != NULL) target = (char *)before[c->target_is];
  oracle_sum(c->type, wanted, before, c->source_count, c->count_elems);
  for (int64_t k = 0; k < c->count_elems && c->exact && c->nulls == 0; k++) {
    int64_t total = 0; /* the oracle itself, where integers can tell */
    char elem[16];
    for (int32_t i = 0; i < c->source_count; i++) {
      int64_t part = (i * 7 + k * 3) % 11 - 5;
      total = c->type->dtype.code == FDP_CODE_BOOL ? total || part != 0 : total + part;
    }
    encode_integer(c->type, total, elem);
    if (memcmp(elem, wanted + k * c->type->elem_bytes, (size_t)c->type->elem_bytes) != 0) {
      check(false, "oracle of exact sums", c->type->dtype.code, c->type->elem_bytes, k);
    }
  }
  memset(target - GUARD_BYTES, 0x5a, GUARD_BYTES);
  memset(target + size_bytes, 0x5a, GUARD_BYTES);
  fdp_sum sum = {target, (const void *const *)before, c->source_count, c->count_elems,
                 c->type->dtype, false};
  check(sum_of(&sum, 1, NULL) == 0, "sum returns 0", 0, 0, 0);
  int64_t at = case_difference(c->type, target, wanted, c->count_elems);
  check(at < 0, c->type->name, c->count_elems, c->source_count, at);
  for (int64_t k = 0; k < GUARD_BYTES; k++) {
    if (target[k - GUARD_BYTES] != 0x5a || target[size_bytes + k] != 0x5a) {
      check(false, "sum wrote outside", c->count_elems, c->source_count, k);
    }
  }
}

static void test_sums(void) {
  static const int64_t lengths[] = {0,  1,  2,  7,   15,  16,  17,  31,  32,  33,   63,  64,
                                    65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1021, 1024,
                                    1025, 20011};
  static const int32_t counts[] = {1, 2, 3, 4, 8, FDP_MAX_REPLICAS};
  for (int t = 0; t < CASE_DTYPES; t++) {
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
      for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
        for (int variant = 0; variant < 3 * 3 * 2 * 2; variant++) {
          if (lengths[l] * counts[n] > 5000 && variant % 7 != 0) continue;
          const case_dtype *type = &case_dtypes[t];
          int64_t misaligned[] = {0, type->elem_bytes, 1};
          int32_t targets[] = {-1, 0, counts[n] - 1};
          sum_case c = {type, lengths[l], counts[n], misaligned[variant % 3],
                        targets[variant / 3 % 3], (int)case_below(20) == 0 ? 2 : variant / 9 % 2,
                        variant / 18 == 0};
          run_sum_case(&c, sum_functions[case_below(2)]);
        }
      }
    }
  }
}

/* Heap blocks without a byte to spare, so that a sanitizer sees any access beyond them. */
static void test_tight_sums(void) {
  for (int t = 0; t < CASE_DTYPES; t++) {
    for (int64_t count = 1; count < 70; count++) {
      size_t size_bytes = (size_t)(count * case_dtypes[t].elem_bytes);
      char *a = malloc(size_bytes), *b = malloc(size_bytes), *target = malloc(size_bytes);
      char *wanted = malloc(size_bytes);
      case_fill(a, (int64_t)size_bytes);
      case_fill(b, (int64_t)size_bytes);
      const void *sources[] = {a, NULL, b};
      fdp_sum sum = {target, sources, 3, count, case_dtypes[t].dtype, false};
      sum_functions[count % 2](&sum, 1, NULL);
      oracle_sum(&case_dtypes[t], wanted, (const char *const *)sources, 3, count);
      check(case_difference(&case_dtypes[t], target, wanted, count) < 0, "tight sum", t, count, 0);
      free(a), free(b), free(target), free(wanted);
    }
  }
}

/* ---- strided copies, pack and unpack ---- */

static void walk_every_index(const fdp_strided_copy *copy, char *target, const char *source) {
  int64_t count = 1;
  for (int32_t d = 0; d < copy->ndim; d++) count *= copy->shape[d];
  for (int64_t linear = 0; linear < count; linear++) {
    int64_t rest = linear, to = 0, from = 0;
    for (int32_t d = copy->ndim - 1; d >= 0; d--) {
      to += rest % copy->shape[d] * copy->target_strides_bytes[d];
      from += rest % copy->shape[d] * copy->source_strides_bytes[d];
      rest /= copy->shape[d];
    }
    for (int64_t k = 0; k < copy->item_bytes; k++) target[to + k] = source[from + k];
  }
}

static void test_strided(void) {
  static const int64_t items[] = {1, 2, 4, 8, 16, 3, 5, 12, 24, 100};
  for (int round = 0; round < 6000; round++) {
    fdp_strided_copy copy = {.item_bytes = items[round % 10],
                             .ndim = (int32_t)case_below(FDP_COPY_MAX_DIMS + 1)};
    int64_t longest = copy.ndim <= 2 ? 40 : copy.ndim <= 4 ? 7 : 3;
    for (int32_t d = 0; d < copy.ndim; d++) {
      copy.shape[d] = case_below(40) == 0 ? 0 : 1 + case_below(longest);
    }
    int64_t to, from, offset = case_below(2);
    int64_t target_bytes = case_strides(&copy, 0, copy.target_strides_bytes, &to) + offset;
    int64_t source_bytes = case_strides(&copy, 1, copy.source_strides_bytes, &from) + offset;
    char *target = malloc((size_t)target_bytes), *wanted = malloc((size_t)target_bytes);
    char *source = malloc((size_t)source_bytes);
    case_fill(source, source_bytes);
    case_fill(target, target_bytes);
    memcpy(wanted, target, (size_t)target_bytes);
    copy.target = target + offset + to;
    copy.source = source + offset + from;
    walk_every_index(&copy, wanted + offset + to, source + offset + from);
    check(fdp_ref_copy_strided(&copy, 1, NULL) == 0, "copy returns 0", 0, 0, 0);
    check(memcmp(target, wanted, (size_t)target_bytes) == 0, "strided copy", round, copy.ndim,
          copy.item_bytes);
    free(target), free(wanted), free(source);
  }
}

static void test_pack(void) {
  enum { SEGMENTS = 23 };
  for (int round = 0; round < 500; round++) {
    fdp_segment segments[SEGMENTS];
    char *kept[SEGMENTS];
    int64_t flat_bytes = 0;
    for (int i = 0; i < SEGMENTS; i++) {
      flat_bytes += case_below(20);
      int64_t size_bytes = case_below(3) == 0 ? case_below(3) : case_below(300);
      segments[i] = (fdp_segment){malloc((size_t)size_bytes + 1), flat_bytes, size_bytes};
      case_fill(segments[i].tensor, size_bytes);
      flat_bytes += size_bytes;
    }
    flat_bytes += 3;
    char *flat = malloc((size_t)flat_bytes), *wanted = malloc((size_t)flat_bytes);
    case_fill(flat, flat_bytes);
    memcpy(wanted, flat, (size_t)flat_bytes);
    for (int i = 0; i < SEGMENTS; i++) {
      fdp_segment *s = &segments[i];
      kept[i] = s->tensor;
      int64_t kind = case_below(5);
      if (kind == 0) s->tensor = NULL;
      if (kind == 1) s->tensor = flat + s->offset_bytes; /* lies in its slot already */
      for (int64_t k = 0; k < s->size_bytes && kind != 1; k++) {
        wanted[s->offset_bytes + k] = kind == 0 ? 0 : kept[i][k];
      }
    }
    check(fdp_ref_pack(flat, segments, SEGMENTS, NULL) == 0, "pack returns 0", 0, 0, 0);
    check(memcmp(flat, wanted, (size_t)flat_bytes) == 0, "pack", round, 0, 0);
    case_fill(flat, flat_bytes);
    memcpy(wanted, flat, (size_t)flat_bytes);
    check(fdp_ref_unpack(flat, segments, SEGMENTS, NULL) == 0, "unpack returns 0", 0, 0, 0);
    check(memcmp(flat, wanted, (size_t)flat_bytes) == 0, "unpack leaves flat alone", round, 0, 0);
    for (int i = 0; i < SEGMENTS; i++) {
      const fdp_segment *s = &segments[i];
      bool moved = s->size_bytes == 0 || s->tensor == NULL ||
                   memcmp(s->tensor, flat + s->offset_bytes, (size_t)s->size_bytes) == 0;
      check(moved, "unpack", round, i, s->size_bytes);
      free(kept[i]);
    }
    free(flat), free(wanted);
  }
}

int main(void) {
  format_fill(&fp16);
  format_fill(&bf16);
  test_every_half(&case_dtypes[2], &fp16);
  test_every_half(&case_dtypes[3], &bf16);
  test_sums();
  test_tight_sums();
  test_strided();
  test_pack();
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
