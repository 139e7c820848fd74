/* What the launchers of pack.cu and copy.cu make of buckets of gigabytes and of copies of more than
 * 2^31 words: each launch is looked at and not run, since no test has such memory. On the host only
 * (Makefile, on_host). Prints "N passed, M failed"; returns 1 if M is not zero. */
#include <assert.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdio.h>

#include "cases.h"

template <typename Table>
static cudaError_t look_at_launch(void (*)(Table), dim3 grid, dim3, void **arguments, size_t,
                                  cudaStream_t) {
  look_at(*static_cast<const Table *>(arguments[0]), grid.x);
  return cudaSuccess;
}

#define host_launch look_at_launch
#include "tile.cuh" /* the Makefile's, for this one and for both below */

#include "../../kernels/copy.cu"
#include "../../kernels/pack.cu"

namespace {

constexpr int64_t GIB = (int64_t)1 << 30;
constexpr int ROUNDS = 3000, SEGMENTS = 6;
constexpr int LOOKS = 24; /* words that are looked at in an entry */

int passed, failed;

void check(bool ok, const char *what, int round) {
  if (ok) {
    passed++;
  } else if (failed++ < 30) {
    printf("FAILED %s, round %d\n", what, round);
  }
}

/* An address that nobody reads. */
char *somewhere(int64_t gib) { return reinterpret_cast<char *>(gib * GIB + case_below(64)); }

/* ---- pack: the entries of all launches cover the segments, in order ---- */

const fdp_segment *next_segment, *last_segment;
char *flat;
int64_t done_bytes;
bool covers;

void look_at(const pack_table &table, uint32_t tiles) {
  covers &= tiles == table.tile_count && tiles <= FDP_MAX_TILES;
  for (int32_t i = 0; i < table.entry_count; i++) {
    uint32_t end = i + 1 < table.entry_count ? table.first_tiles[i + 1] : tiles;
    int64_t entry_tiles = end - table.first_tiles[i], size = table.sizes[i];
    while (next_segment < last_segment && done_bytes == next_segment->size_bytes) {
      next_segment++;
      done_bytes = 0;
    }
    covers &= next_segment < last_segment && size <= next_segment->size_bytes - done_bytes;
    if (!covers) return;
    covers &= table.flat + table.offsets[i] == flat + next_segment->offset_bytes + done_bytes;
    covers &= table.tensors[i] == static_cast<char *>(next_segment->tensor) + done_bytes;
    covers &= entry_tiles == (size + FDP_TILE_BYTES - 1) / FDP_TILE_BYTES;
    done_bytes += size;
  }
}

void test_pack() {
  for (int round = 0; round < ROUNDS; round++) {
    fdp_segment segments[SEGMENTS];
    int32_t count = 1 + (int32_t)case_below(SEGMENTS);
    int64_t end = 0;
    for (int32_t i = 0; i < count; i++) {
      end += case_below(3) ? case_below(100) : case_below(9 * GIB);
      int64_t size = case_below(3) ? case_below(100000) : case_below(20 * GIB);
      segments[i] = fdp_segment{somewhere(2000 + 100 * i), end, size};
      end += size;
    }
    flat = somewhere(1000);
    next_segment = segments;
    last_segment = segments + count;
    done_bytes = 0;
    covers = true;
    int error = fdp_cuda_pack(flat, segments, count, nullptr);
    while (next_segment < last_segment && done_bytes == next_segment->size_bytes) {
      next_segment++;
      done_bytes = 0;
    }
    check(error == 0 && covers && next_segment == last_segment, "pack", round);
  }
}

/* ---- copies: as many bytes as there are, and each word from where its place says ---- */

const fdp_strided_copy *planned;
int64_t planned_bytes;
bool is_right;

/* The offset in the source of what has that offset in the target, whose dimensions nest. */
int64_t source_offset(int64_t target_offset) {
  bool is_used[FDP_COPY_MAX_DIMS] = {};
  int64_t source = 0, rest = target_offset;
  for (int32_t d = 0; d < planned->ndim; d++) {
    int64_t stride = planned->target_strides_bytes[d];
    if (stride < 0) rest -= (planned->shape[d] - 1) * stride; /* from the lowest address on */
  }
  for (int32_t n = 0; n < planned->ndim; n++) {
    int32_t outer = -1;
    for (int32_t d = 0; d < planned->ndim; d++) {
      bool is_larger = outer < 0 || magnitude(planned->target_strides_bytes[d]) >
                                        magnitude(planned->target_strides_bytes[outer]);
      if (!is_used[d] && planned->shape[d] > 1 && is_larger) outer = d;
    }
    if (outer < 0) break;
    is_used[outer] = true;
    int64_t stride = planned->target_strides_bytes[outer], index = rest / magnitude(stride);
    rest %= magnitude(stride);
    if (stride < 0) index = planned->shape[outer] - 1 - index;
    is_right &= index >= 0 && index < planned->shape[outer];
    source += index * planned->source_strides_bytes[outer];
  }
  return source + rest;
}

void look_at_word(const copy_entry &entry, const copy_dim *dims, uint32_t n) {
  int64_t to = 0, from = 0;
  for (int d = 0; d < entry.dim_count; d++) {
    uint32_t quotient = d + 1 < entry.dim_count ? divide(n, dims[d]) : 0;
    is_right &= d + 1 == entry.dim_count || quotient == n / dims[d].size;
    int64_t index = n - quotient * dims[d].size;
    is_right &= index < dims[d].size;
    to += index * dims[d].target_stride;
    from += index * dims[d].source_stride;
    n = quotient;
  }
  const char *target = entry.target + to, *source = entry.source + from;
  uint64_t both = reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source);
  is_right &= both % entry.word_bytes == 0;
  int64_t expected = source_offset(target - static_cast<const char *>(planned->target));
  is_right &= source == static_cast<const char *>(planned->source) + expected;
}

void look_at(const copy_table &table, uint32_t tiles) {
  is_right &= tiles == table.tile_count && tiles <= FDP_MAX_TILES;
  for (int32_t i = 0; i < table.entry_count; i++) {
    const copy_entry &entry = table.entries[i];
    const copy_dim *dims = &table.dims[entry.first_dim];
    planned_bytes += (int64_t)entry.word_count * entry.word_bytes;
    look_at_word(entry, dims, 0);
    look_at_word(entry, dims, entry.word_count - 1);
    for (int k = 0; k < LOOKS; k++) {
      look_at_word(entry, dims, (uint32_t)case_below(entry.word_count));
    }
  }
}

void test_copies() {
  static const int64_t items[] = {1, 2, 3, 4, 8, 16, 48, 1000};
  for (int round = 0; round < ROUNDS; round++) {
    fdp_strided_copy copy = {};
    int64_t words = 1, origin_bytes;
    copy.ndim = (int32_t)case_below(5);
    copy.item_bytes = copy.ndim == 0 ? 1 + case_below(40 * GIB) : items[case_below(8)];
    for (int32_t d = 0; d < copy.ndim; d++) {
      copy.shape[d] = 1 + case_below(case_below(2) ? 300 : 70000);
      if (words * copy.shape[d] > 16 * GIB) copy.shape[d] = 1;
      words *= copy.shape[d];
    }
    case_strides(&copy, 0, copy.target_strides_bytes, &origin_bytes);
    case_strides(&copy, 1, copy.source_strides_bytes, &origin_bytes);
    copy.target = somewhere(1 << 20);
    copy.source = somewhere(1 << 21);
    planned = &copy;
    planned_bytes = 0;
    is_right = true;
    int error = fdp_cuda_copy_strided(&copy, 1, nullptr);
    check(error == 0 && is_right, "the words of a copy", round);
    check(planned_bytes == words * copy.item_bytes, "the bytes of a copy", round);
  }
}

}  // namespace

int main() {
  test_pack();
  test_copies();
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
