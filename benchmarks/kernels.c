/* Rates of the plain C kernels beside what this machine's memory can do.
 *
 *   gcc -std=c11 -O2 benchmarks/kernels.c kernels/ref.c kernels/ref_sum.c -o kernels-bench
 *   ./kernels-bench [--json]
 *
 * Copies stand beside memcpy. Sums stand beside the rate of the plainest loop that reads two arrays
 * and writes one (STREAM's "add", in 64-bit words so that arithmetic never is what takes the time);
 * in place, beside the same loop in place. All rates count bytes read plus bytes written, on one
 * thread, arrays far larger than the caches; the two sides of a comparison run in turn, and the
 * median and the spread of the rounds are printed. */
#define _POSIX_C_SOURCE 199309L
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../kernels/kernels.h"

enum { ROUNDS = 15, MAX_SOURCES = 8, ARRAY_BYTES = 128 << 20 };
enum { SKEW_BYTES = 5 * 4096 + 7 * 64 }; /* so that arrays do not share cache sets and banks */

static char *arrays[MAX_SOURCES + 1];
static bool as_json;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

typedef struct job {
  const char *name;
  void (*run)(const struct job *job);
  void (*floor)(const struct job *job);
  fdp_dtype dtype;
  int64_t elem_bytes;
  int32_t source_count;
} job;

static void print_result(const job *j, double *ours_s, double *floor_s) {
  double moved_bytes = (double)(j->source_count + 1) * ARRAY_BYTES;
  double floor_bytes = (double)(j->source_count > 1 ? 3 : 2) * ARRAY_BYTES;
  qsort(ours_s, ROUNDS, sizeof *ours_s, by_value);
  qsort(floor_s, ROUNDS, sizeof *floor_s, by_value);
  double ours = moved_bytes / ours_s[ROUNDS / 2] / 1e9;
  double floor_rate = floor_bytes / floor_s[ROUNDS / 2] / 1e9;
  const char *format =
      as_json ? "{\"name\": \"%s\", \"sources\": %d, \"gb_per_s\": %.2f, \"slowest\": %.2f, "
                "\"fastest\": %.2f, \"floor_gb_per_s\": %.2f, \"share\": %.3f}\n"
              : "%-26s %2d  %7.2f GB/s (%.2f to %.2f)   floor %7.2f   share %.2f\n";
  printf(format, j->name, (int)j->source_count, ours, moved_bytes / ours_s[ROUNDS - 1] / 1e9,
         moved_bytes / ours_s[0] / 1e9, floor_rate, ours / floor_rate);
}

static void measure(const job *j) {
  double ours_s[ROUNDS], floor_s[ROUNDS];
  j->run(j);
  j->floor(j);
  for (int round = 0; round < ROUNDS; round++) {
    double start = now_s();
    j->floor(j);
    double middle = now_s();
    j->run(j);
    floor_s[round] = middle - start;
    ours_s[round] = now_s() - middle;
  }
  print_result(j, ours_s, floor_s);
}

/* ---- floors ---- */

static void floor_memcpy(const job *j) {
  (void)j;
  memcpy(arrays[MAX_SOURCES], arrays[0], ARRAY_BYTES);
}

typedef uint64_t words __attribute__((vector_size(16), may_alias));

static void add_two(words *target, const words *a, const words *b) {
  for (size_t k = 0; k < ARRAY_BYTES / sizeof *target; k++) target[k] = a[k] + b[k];
}

static void floor_stream(const job *j) {
  (void)j;
  add_two((words *)arrays[MAX_SOURCES], (const words *)arrays[0], (const words *)arrays[1]);
}

static void floor_stream_in_place(const job *j) {
  (void)j;
  add_two((words *)arrays[0], (const words *)arrays[0], (const words *)arrays[1]);
}

/* ---- ours ---- */

static void run_sum(const job *j) {
  fdp_sum sum = {arrays[MAX_SOURCES], (const void *const *)arrays, j->source_count,
                 ARRAY_BYTES / j->elem_bytes, j->dtype};
  fdp_ref_sum(&sum, 1, NULL);
}

static void run_sum_in_place(const job *j) {
  fdp_sum sum = {arrays[0], (const void *const *)arrays, j->source_count,
                 ARRAY_BYTES / j->elem_bytes, j->dtype};
  fdp_ref_sum(&sum, 1, NULL);
}

static void run_copy(const job *j) {
  (void)j;
  fdp_strided_copy copy = {arrays[MAX_SOURCES], arrays[0], ARRAY_BYTES, 0, {0}, {0}, {0}};
  fdp_ref_copy_strided(&copy, 1, NULL);
}

/* Rows of 4 KB out of rows of 8 KB, as a slice along an inner dimension gives. */
static void run_copy_rows(const job *j) {
  (void)j;
  fdp_strided_copy copy = {arrays[MAX_SOURCES], arrays[0], 4096, 1, {ARRAY_BYTES / 8192}, {4096},
                           {8192}};
  fdp_ref_copy_strided(&copy, 1, NULL);
  copy.source = arrays[1];
  copy.target = arrays[MAX_SOURCES] + ARRAY_BYTES / 2;
  fdp_ref_copy_strided(&copy, 1, NULL);
}

/* NCHW to NHWC, fp32, 64 channels of 56 x 56. */
static void run_copy_transposed(const job *j) {
  (void)j;
  enum { C = 64, P = 56 * 56 };
  fdp_strided_copy copy = {arrays[MAX_SOURCES], arrays[0], 4, 3, {ARRAY_BYTES / (4 * C * P), P, C},
                           {4 * C * P, 4 * C, 4}, {4 * C * P, 4, 4 * P}};
  fdp_ref_copy_strided(&copy, 1, NULL);
}

static void run_pack(const job *j) {
  (void)j;
  enum { SEGMENTS = 161 };
  fdp_segment segments[SEGMENTS];
  int64_t size_bytes = ARRAY_BYTES / SEGMENTS / 64 * 64;
  for (int i = 0; i < SEGMENTS; i++) {
    segments[i] = (fdp_segment){arrays[0] + i * size_bytes, i * size_bytes, size_bytes};
  }
  fdp_ref_pack(arrays[MAX_SOURCES], segments, SEGMENTS, NULL);
}

int main(int argc, char **argv) {
  as_json = argc > 1 && strcmp(argv[1], "--json") == 0;
  for (int i = 0; i <= MAX_SOURCES; i++) {
    arrays[i] = aligned_alloc(4096, ARRAY_BYTES + SKEW_BYTES * MAX_SOURCES);
    if (arrays[i] == NULL) return fprintf(stderr, "no memory\n"), 1;
    arrays[i] += i * SKEW_BYTES;
    memset(arrays[i], 0x3c, ARRAY_BYTES);
  }
  const fdp_dtype f32 = {FDP_CODE_FLOAT, 32, 1};
  const job copies[] = {{"copy", run_copy, floor_memcpy, f32, 4, 1},
                        {"copy rows of 4 KB", run_copy_rows, floor_memcpy, f32, 4, 1},
                        {"copy NCHW to NHWC", run_copy_transposed, floor_memcpy, f32, 4, 1},
                        {"pack 161 tensors", run_pack, floor_memcpy, f32, 4, 1}};
  for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) measure(&copies[i]);
  const job sums[] = {
      {"sum float32", run_sum, floor_stream, f32, 4, 0},
      {"sum float32 in place", run_sum_in_place, floor_stream_in_place, f32, 4, 0},
      {"sum float64", run_sum, floor_stream, {FDP_CODE_FLOAT, 64, 1}, 8, 0},
      {"sum bfloat16", run_sum, floor_stream, {FDP_CODE_BFLOAT, 16, 1}, 2, 0},
      {"sum bfloat16 in place", run_sum_in_place, floor_stream_in_place,
       {FDP_CODE_BFLOAT, 16, 1}, 2, 0},
      {"sum float16", run_sum, floor_stream, {FDP_CODE_FLOAT, 16, 1}, 2, 0},
      {"sum int32", run_sum, floor_stream, {FDP_CODE_INT, 32, 1}, 4, 0},
      {"sum int8", run_sum, floor_stream, {FDP_CODE_INT, 8, 1}, 1, 0},
      {"sum bool", run_sum, floor_stream, {FDP_CODE_BOOL, 8, 1}, 1, 0}};
  const int32_t counts[] = {2, 3, MAX_SOURCES};
  for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
    for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
      job j = sums[i];
      j.source_count = counts[n];
      measure(&j);
    }
  }
  return 0;
}
