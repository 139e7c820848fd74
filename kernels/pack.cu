/* Packing tensors into a flat buffer and back: a whole bucket in one launch, as a rule. */
#include "kernels.h"

#include <assert.h>
#include <stddef.h>

#include "tile.cuh"

namespace {

constexpr int32_t MAX_ENTRIES = 200;
constexpr uint32_t MAX_ENTRY_BYTES = 0xffffffffu - FDP_TILE_BYTES;

/* Offsets are relative to `flat`, which each launch sets anew, so that 32 bits do. */
struct pack_table {
  char *flat;
  char *tensors[MAX_ENTRIES];
  uint32_t offsets[MAX_ENTRIES];
  uint32_t sizes[MAX_ENTRIES];
  uint32_t first_tiles[MAX_ENTRIES];
  int32_t entry_count;
  uint32_t tile_count;
};
static_assert(sizeof(pack_table) <= FDP_PARAMETER_BYTES, "a kernel's parameters are too large");

/* Cuts off the front of the segments what one launch can take. `*segment` and `*done_bytes` (of
 * that segment) say where the rest begins. Pure. */
void plan_table(pack_table *table, char *flat, const fdp_segment *segments, int32_t segment_count,
                bool skips_null, int32_t *segment, int64_t *done_bytes) {
  table->flat = nullptr;
  table->entry_count = 0;
  table->tile_count = 0;
  for (; *segment < segment_count; ++*segment, *done_bytes = 0) {
    const fdp_segment *next = &segments[*segment];
    assert(next->offset_bytes >= 0 && next->size_bytes >= 0);
    if (next->tensor == nullptr && skips_null) continue;
    if (next->tensor == flat + next->offset_bytes) continue; /* lies in its slot already */
    while (*done_bytes < next->size_bytes) {
      char *place = flat + next->offset_bytes + *done_bytes;
      int64_t size = next->size_bytes - *done_bytes;
      if (size > MAX_ENTRY_BYTES) size = MAX_ENTRY_BYTES / FDP_TILE_BYTES * FDP_TILE_BYTES;
      uint32_t tiles = (uint32_t)((size + FDP_TILE_BYTES - 1) / FDP_TILE_BYTES);
      if (table->entry_count == 0) table->flat = place;
      ptrdiff_t offset = place - table->flat;
      bool fits = table->entry_count < MAX_ENTRIES && offset >= 0 && offset <= 0xffffffff &&
                  table->tile_count + tiles <= FDP_MAX_TILES;
      if (!fits) return;
      int32_t entry = table->entry_count++;
      table->tensors[entry] = next->tensor ? (char *)next->tensor + *done_bytes : nullptr;
      table->offsets[entry] = (uint32_t)offset;
      table->sizes[entry] = (uint32_t)size;
      table->first_tiles[entry] = table->tile_count;
      table->tile_count += tiles;
      *done_bytes += size;
    }
  }
}

/* A block moves `size` bytes, at most one tile, in words of the type. */
template <typename Word>
__device__ void move_words(char *target, const char *source, uint32_t size) {
  constexpr uint32_t BATCH = FDP_TILE_WORDS;
  uint32_t count = size / sizeof(Word);
  Word *to = reinterpret_cast<Word *>(target);
  const Word *from = reinterpret_cast<const Word *>(source);
  for (uint32_t start = threadIdx.x; start < count; start += BATCH * FDP_TILE_THREADS) {
    Word words[BATCH];
#pragma unroll
    for (uint32_t k = 0; k < BATCH; ++k) {
      uint32_t at = start + k * FDP_TILE_THREADS;
      if (at < count) words[k] = from ? from[at] : Word();
    }
#pragma unroll
    for (uint32_t k = 0; k < BATCH; ++k) {
      uint32_t at = start + k * FDP_TILE_THREADS;
      if (at < count) to[at] = words[k];
    }
  }
}

/* In the largest words in which the two addresses are alike; what comes before the first whole word
 * and after the last goes byte by byte. */
__device__ void move_tile(char *target, const char *source, uint32_t size) {
  uint64_t place = reinterpret_cast<uint64_t>(target);
  uint64_t other = source ? reinterpret_cast<uint64_t>(source) : place;
  uint32_t word_bytes = fdp_word_bytes(place ^ other);
  uint32_t head = (uint32_t)(-place & (word_bytes - 1));
  if (head > size) head = size;
  uint32_t body = (size - head) / word_bytes * word_bytes;
  uint32_t tail = size - head - body;
  const char *body_source = source ? source + head : nullptr;
  if (threadIdx.x < head) target[threadIdx.x] = source ? source[threadIdx.x] : 0;
  switch (word_bytes) {
    case 16: move_words<uint4>(target + head, body_source, body); break;
    case 8: move_words<uint2>(target + head, body_source, body); break;
    case 4: move_words<uint32_t>(target + head, body_source, body); break;
    case 2: move_words<uint16_t>(target + head, body_source, body); break;
    default: move_words<uint8_t>(target + head, body_source, body);
  }
  if (threadIdx.x < tail) {
    uint32_t at = head + body + threadIdx.x;
    target[at] = source ? source[at] : 0;
  }
}

template <bool PACKS>
__global__ void __launch_bounds__(FDP_TILE_THREADS)
    pack_kernel(const __grid_constant__ pack_table table) {
  int32_t entry = fdp_entry_of_tile(table.first_tiles, table.entry_count, blockIdx.x);
  uint32_t start = (blockIdx.x - table.first_tiles[entry]) * FDP_TILE_BYTES;
  uint32_t size = table.sizes[entry] - start;
  if (size > FDP_TILE_BYTES) size = FDP_TILE_BYTES;
  char *slot = table.flat + table.offsets[entry] + start;
  char *tensor = table.tensors[entry] ? table.tensors[entry] + start : nullptr;
  if (PACKS) move_tile(slot, tensor, size); else move_tile(tensor, slot, size);
}

template <bool PACKS>
int launch_all(char *flat, const fdp_segment *segments, int32_t segment_count, void *stream) {
  assert(segment_count >= 0);
  pack_table table;
  int32_t segment = 0;
  int64_t done_bytes = 0;
  for (;;) {
    plan_table(&table, flat, segments, segment_count, !PACKS, &segment, &done_bytes);
    if (table.entry_count == 0) return 0;
    int error = fdp_launch(pack_kernel<PACKS>, table, table.tile_count, stream);
    if (error != 0) return error;
  }
}

}  // namespace

extern "C" int fdp_cuda_pack(void *flat, const fdp_segment *segments, int32_t segment_count,
                             void *stream) {
  return launch_all<true>(static_cast<char *>(flat), segments, segment_count, stream);
}

extern "C" int fdp_cuda_unpack(const void *flat, const fdp_segment *segments,
                               int32_t segment_count, void *stream) {
  char *slots = const_cast<char *>(static_cast<const char *>(flat)); /* read only */
  return launch_all<false>(slots, segments, segment_count, stream);
}
