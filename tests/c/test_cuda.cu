/* Each CUDA kernel against the same call in plain C, on random cases, then their rates. `make
 * gpu-test` builds and runs it; `test_cuda short` takes fewer rounds and measures nothing.
 *
 * A case is laid out in one arena of random bytes, once on the host and once on the GPU; the call
 * runs on both and the whole arenas must be equal after it: so a byte written outside a target is
 * seen too. Only of a NaN the payload may differ. Prints "N passed, M failed"; returns 1 if M is
 * not zero. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "rates.cuh"

static const int64_t ARENA_BYTES = 64 << 20, TILE_BYTES = 16384;

static char *host, *device, *back;
static int64_t used_bytes;
static int passed, failed;

static void check(bool ok, const char *what, int64_t a, int64_t b, int64_t c) {
  if (ok) {
    passed++;
  } else if (failed++ < 30) {
    printf("FAILED %s (%lld, %lld, %lld)\n", what, (long long)a, (long long)b, (long long)c);
  }
}

/* ---- the arena ---- */

static void arena_clear(void) { used_bytes = 256; }

/* Room for `size_bytes` at `skew_bytes` past an address that 256 divides. Returns the offset. */
static int64_t arena_take(int64_t size_bytes, int64_t skew_bytes) {
  int64_t offset = used_bytes + skew_bytes;
  used_bytes = (offset + size_bytes + 256 + 255) / 256 * 256;
  if (used_bytes > ARENA_BYTES) {
    printf("FAILED the arena is too small\n");
    exit(1);
  }
  return offset;
}

static void arena_begin(void) {
  case_fill(host, used_bytes);
  need(cudaMemcpyAsync(device, host, used_bytes, cudaMemcpyHostToDevice, stream), "to the GPU");
  /* The arena on the host is written next, by the plain C call. */
  need(cudaStreamSynchronize(stream), "to the GPU");
}

static void arena_fetch(void) {
  need(cudaMemcpyAsync(back, device, used_bytes, cudaMemcpyDeviceToHost, stream), "from the GPU");
  need(cudaStreamSynchronize(stream), "the kernel");
}

static int64_t arena_difference(void) {
  if (memcmp(host, back, used_bytes) == 0) return -1;
  int64_t k = 0;
  while (host[k] == back[k]) k++;
  return k;
}

/* ---- sums ---- */

enum { SUMS = 150, ADDRESSES = SUMS * FDP_MAX_REPLICAS };

/* Sums by offsets in the arena; a source that is NULL has the offset -1. */
typedef struct sum_list {
  int count, address_count;
  const case_dtype *types[SUMS];
  int64_t targets[SUMS], counts[SUMS], sources[ADDRESSES];
  int source_counts[SUMS];
} sum_list;

static void sum_add(sum_list *list, const case_dtype *type, int64_t count, int source_count,
                    int skew, int target_is, int nulls) {
  int64_t small = type->dtype.code == FDP_CODE_COMPLEX ? type->elem_bytes / 2 : type->elem_bytes;
  int64_t size = count * type->elem_bytes;
  int64_t *sources = &list->sources[list->address_count];
  int i = list->count++;
  for (int s = 0; s < source_count; s++) {
    int64_t skew_bytes = skew == 0 ? 0 : skew == 1 ? small : small * case_below(16 / small + 1);
    bool is_null = nulls == 2 || (nulls == 1 && s != target_is && case_below(2));
    sources[s] = is_null ? -1 : arena_take(size, skew_bytes);
  }
  list->address_count += source_count;
  list->types[i] = type;
  list->counts[i] = count;
  list->source_counts[i] = source_count;
  list->targets[i] = target_is >= 0 && sources[target_is] >= 0
                         ? sources[target_is]
                         : arena_take(size, skew == 0 ? 0 : skew == 1 ? small : 0);
}

/* The list with addresses in one of the arenas. */
static void sum_bind(const sum_list *list, char *base, fdp_sum *sums, const void **sources) {
  int first = 0;
  for (int k = 0; k < list->address_count; k++) {
    sources[k] = list->sources[k] < 0 ? NULL : base + list->sources[k];
  }
  for (int i = 0; i < list->count; i++) {
    sums[i].target = base + list->targets[i];
    sums[i].sources = sources + first;
    sums[i].source_count = list->source_counts[i];
    sums[i].count_elems = list->counts[i];
    sums[i].dtype = list->types[i]->dtype;
    sums[i].over_link = list->count % 2 == 0; /* whichever the size of the launch */
    first += list->source_counts[i];
  }
}

static void sum_run(const sum_list *list, const char *what) {
  static fdp_sum sums[SUMS];
  static const void *sources[ADDRESSES];
  arena_begin();
  sum_bind(list, device, sums, sources);
  need((cudaError_t)fdp_cuda_sum(sums, list->count, stream), what);
  sum_bind(list, host, sums, sources);
  fdp_ref_sum(sums, list->count, NULL);
  arena_fetch();
  for (int i = 0; i < list->count; i++) {
    int64_t size = list->counts[i] * list->types[i]->elem_bytes;
    char *ours = back + list->targets[i], *wanted = host + list->targets[i];
    int64_t at = case_difference(list->types[i], ours, wanted, list->counts[i]);
    check(at < 0, list->types[i]->name, list->counts[i], list->source_counts[i], at);
    memcpy(ours, wanted, size); /* what is left then is a write elsewhere */
  }
  int64_t at = arena_difference();
  check(at < 0, "sum wrote elsewhere", list->count, list->source_counts[0], at);
}

static void test_sums(void) {
  static sum_list list;
  static const int counts[] = {1, 2, 3, 8, FDP_MAX_REPLICAS};
  for (int t = 0; t < CASE_DTYPES; t++) {
    const case_dtype *type = &case_dtypes[t];
    int64_t tile = TILE_BYTES / type->elem_bytes;
    const int64_t lengths[] = {0,  1,  2,    7,        15,   16,       17,
                               33, 97, 1021, tile - 1, tile, tile + 1, 3 * tile + 5};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
      for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
        list.count = list.address_count = 0;
        arena_clear();
        for (int variant = 0; variant < 3 * 3 * 2; variant++) {
          int targets[] = {-1, 0, counts[n] - 1};
          if (lengths[l] * counts[n] > 40000 && variant % 5 != 0) continue;
          sum_add(&list, type, lengths[l], counts[n], variant % 3, targets[variant / 3 % 3],
                  case_below(12) == 0 ? 2 : variant / 9);
        }
        sum_run(&list, "sum");
      }
    }
  }
  for (int round = 0; round < 40; round++) { /* many in one call, of any dtype */
    int one_dtype = round % 2 ? (int)case_below(CASE_DTYPES) : -1;
    list.count = list.address_count = 0;
    arena_clear();
    for (int i = 0; i < SUMS; i++) {
      int t = one_dtype >= 0 ? one_dtype : (int)case_below(CASE_DTYPES);
      int source_count = 1 + (int)case_below(round % 4 == 0 ? FDP_MAX_REPLICAS : 4);
      sum_add(&list, &case_dtypes[t], case_below(case_below(4) ? 200 : 3000), source_count,
              (int)case_below(3), (int)case_below(source_count + 1) - 1, case_below(6) == 0);
    }
    sum_run(&list, "many sums");
  }
}

/* All pairs of one value with every other, for the rounding of 16-bit floats. */
static void test_every_half(const case_dtype *type, int rounds) {
  static sum_list list;
  for (int round = 0; round < rounds; round++) {
    list.count = list.address_count = 0;
    arena_clear();
    sum_add(&list, type, 65536, 2 + round % 2, 0, -1, 0);
    arena_begin();
    for (int k = 0; k < 65536; k++) {
      uint16_t bits = (uint16_t)k;
      memcpy(host + list.sources[0] + 2 * k, &bits, 2);
    }
    fdp_sum sum;
    const void *sources[3];
    need(cudaMemcpyAsync(device, host, used_bytes, cudaMemcpyHostToDevice, stream), "to the GPU");
    sum_bind(&list, device, &sum, sources);
    need((cudaError_t)fdp_cuda_sum(&sum, 1, stream), "every 16-bit value");
    sum_bind(&list, host, &sum, sources);
    fdp_ref_sum(&sum, 1, NULL);
    arena_fetch();
    int64_t at = case_difference(type, back + list.targets[0], host + list.targets[0], 65536);
    check(at < 0, "every 16-bit value", type->dtype.code, round, at);
  }
}

/* ---- pack and unpack ---- */

static void test_pack(int rounds) {
  enum { SEGMENTS = 450 };
  static fdp_segment on_gpu[SEGMENTS], on_host[SEGMENTS];
  for (int round = 0; round < rounds; round++) {
    int count = round % 5 == 0 ? SEGMENTS : 1 + (int)case_below(30);
    bool is_shuffled = case_below(4) == 0, unpacks = round % 2;
    int64_t flat_bytes = 0;
    arena_clear();
    for (int i = 0; i < count; i++) {
      int64_t size = case_below(3) == 0   ? case_below(40)
                     : case_below(9) == 0 ? case_below(6 * TILE_BYTES)
                                          : case_below(3000);
      if (round % 3 == 0) flat_bytes = (flat_bytes + 63) / 64 * 64; /* as buckets are */
      else flat_bytes += case_below(20);
      on_gpu[i].offset_bytes = flat_bytes;
      on_gpu[i].size_bytes = size;
      flat_bytes += size;
    }
    int64_t flat = arena_take(flat_bytes, round % 3 == 0 ? 0 : case_below(17));
    for (int i = 0; i < count; i++) {
      int64_t kind = case_below(8), skew = round % 3 == 0 ? 0 : case_below(17);
      int64_t place = kind == 1 ? flat + on_gpu[i].offset_bytes
                                : arena_take(on_gpu[i].size_bytes, skew);
      on_host[i] = on_gpu[i];
      on_gpu[i].tensor = kind == 0 ? NULL : device + place;
      on_host[i].tensor = kind == 0 ? NULL : host + place;
    }
    for (int i = 0; i < count && is_shuffled; i++) {
      int other = (int)case_below(count);
      fdp_segment kept = on_gpu[i];
      on_gpu[i] = on_gpu[other], on_gpu[other] = kept;
      kept = on_host[i];
      on_host[i] = on_host[other], on_host[other] = kept;
    }
    arena_begin();
    int error = unpacks ? fdp_cuda_unpack(device + flat, on_gpu, count, stream)
                        : fdp_cuda_pack(device + flat, on_gpu, count, stream);
    need((cudaError_t)error, "pack");
    if (unpacks) fdp_ref_unpack(host + flat, on_host, count, NULL);
    else fdp_ref_pack(host + flat, on_host, count, NULL);
    arena_fetch();
    check(arena_difference() < 0, unpacks ? "unpack" : "pack", round, count, arena_difference());
  }
}

/* ---- strided copies ---- */

static void test_strided(int rounds) {
  enum { COPIES = 60 };
  static fdp_strided_copy on_gpu[COPIES], on_host[COPIES];
  static const int64_t items[] = {1, 2, 4, 8, 16, 3, 5, 12, 24, 100, 4096, 40001};
  for (int round = 0; round < rounds; round++) {
    int count = round % 10 == 0 ? COPIES : 1 + (int)case_below(4);
    arena_clear();
    for (int i = 0; i < count; i++) {
      fdp_strided_copy *copy = &on_gpu[i];
      int64_t from, to;
      copy->item_bytes = items[case_below(12)];
      copy->ndim = (int32_t)case_below(FDP_COPY_MAX_DIMS + 1);
      if (copy->item_bytes > 4000) copy->ndim %= 3;
      int64_t longest = copy->ndim <= 2 ? 40 : copy->ndim <= 4 ? 7 : 3;
      if (copy->item_bytes > 4000) longest = 5;
      for (int d = 0; d < copy->ndim; d++) {
        copy->shape[d] = case_below(60) == 0 ? 0 : 1 + case_below(longest);
      }
      int64_t target_bytes = case_strides(copy, 0, copy->target_strides_bytes, &to);
      int64_t source_bytes = case_strides(copy, 1, copy->source_strides_bytes, &from);
      int64_t target = arena_take(target_bytes, case_below(3) ? 0 : case_below(17)) + to;
      int64_t source = arena_take(source_bytes, case_below(3) ? 0 : case_below(17)) + from;
      on_host[i] = *copy;
      copy->target = device + target;
      copy->source = device + source;
      on_host[i].target = host + target;
      on_host[i].source = host + source;
    }
    arena_begin();
    need((cudaError_t)fdp_cuda_copy_strided(on_gpu, count, stream), "strided copy");
    fdp_ref_copy_strided(on_host, count, NULL);
    arena_fetch();
    check(arena_difference() < 0, "strided copy", round, count, arena_difference());
  }
}

int main(int argument_count, char **arguments) {
  bool is_short = argument_count > 1 && strcmp(arguments[1], "short") == 0;
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  need(cudaMallocHost((void **)&host, ARENA_BYTES), "host memory");
  need(cudaMallocHost((void **)&back, ARENA_BYTES), "host memory");
  need(cudaMalloc((void **)&device, ARENA_BYTES), "memory");
  test_every_half(&case_dtypes[2], is_short ? 2 : 64);
  test_every_half(&case_dtypes[3], is_short ? 2 : 64);
  test_sums();
  test_pack(is_short ? 30 : 120);
  test_strided(is_short ? 60 : 600);
  if (!is_short) measure_rates();
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
