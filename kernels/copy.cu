/* Copies of strided arrays, several in one launch. The dimensions are put in the order of the
 * target's strides, so that neighbouring threads write neighbouring addresses, and merged where
 * they follow each other in both arrays; then each thread copies words by their number. */
#include "kernels.h"

#include <assert.h>

#include "tile.cuh"

namespace {

/* Words of one copy: indices are 32 bits, and the fast division needs one bit to spare. */
constexpr int64_t MAX_WORDS = (int64_t)1 << 31;
constexpr int MAX_DIMS = FDP_COPY_MAX_DIMS + 1; /* and one for the words of an item */
constexpr int MAX_COPIES = 40;
constexpr int MAX_TABLE_DIMS = 112;

/* A dimension, and n / size as (mulhi(n, magic) + n) >> shift for n < 2^31 (Granlund and
 * Montgomery). Strides are in bytes. */
struct copy_dim {
  uint32_t size;
  uint32_t magic;
  int64_t target_stride;
  int64_t source_stride;
};

struct copy_entry {
  char *target;
  const char *source;
  uint32_t word_count;
  uint8_t word_bytes;
  uint8_t dim_count;
  uint16_t first_dim;
};

struct copy_table {
  copy_entry entries[MAX_COPIES];
  copy_dim dims[MAX_TABLE_DIMS];
  uint32_t first_tiles[MAX_COPIES];
  int32_t entry_count;
  int32_t dim_count;
  uint32_t tile_count;
};
static_assert(sizeof(copy_table) <= FDP_PARAMETER_BYTES, "a kernel's parameters are too large");

/* ---- the plan: pure functions ---- */

/* A copy with all of its dimensions in words, innermost first. */
struct word_copy {
  char *target;
  const char *source;
  uint32_t word_bytes;
  int dim_count;
  int64_t sizes[MAX_DIMS];
  int64_t target_strides[MAX_DIMS];
  int64_t source_strides[MAX_DIMS];
};

int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

int64_t word_count(const word_copy *copy) {
  int64_t count = 1;
  for (int d = 0; d < copy->dim_count; ++d) count *= copy->sizes[d];
  return count;
}

/* Dimensions by the target's stride, the smallest innermost. There are few: insertion. */
void sort_dims(word_copy *copy) {
  for (int d = 1; d < copy->dim_count; ++d) {
    int64_t size = copy->sizes[d];
    int64_t to = copy->target_strides[d], from = copy->source_strides[d];
    int place = d;
    for (; place > 0 && magnitude(copy->target_strides[place - 1]) > magnitude(to); --place) {
      copy->sizes[place] = copy->sizes[place - 1];
      copy->target_strides[place] = copy->target_strides[place - 1];
      copy->source_strides[place] = copy->source_strides[place - 1];
    }
    copy->sizes[place] = size;
    copy->target_strides[place] = to;
    copy->source_strides[place] = from;
  }
}

/* A dimension that goes on where the one inside it ended, on both sides, is the same dimension. */
void merge_dims(word_copy *copy) {
  int kept = 0;
  for (int d = 1; d < copy->dim_count; ++d) {
    int64_t size = copy->sizes[kept];
    if (copy->target_strides[d] == copy->target_strides[kept] * size &&
        copy->source_strides[d] == copy->source_strides[kept] * size) {
      copy->sizes[kept] *= copy->sizes[d];
      continue;
    }
    ++kept;
    copy->sizes[kept] = copy->sizes[d];
    copy->target_strides[kept] = copy->target_strides[d];
    copy->source_strides[kept] = copy->source_strides[d];
  }
  if (copy->dim_count > 0) copy->dim_count = kept + 1;
}

/* `size` bytes from `start` of a copy that is one run of bytes on both sides. */
word_copy run_part(const word_copy *bytes, int64_t start, int64_t size, uint32_t word_bytes) {
  word_copy part = *bytes;
  part.target += start;
  part.source += start;
  part.word_bytes = word_bytes;
  part.sizes[0] = size / word_bytes;
  part.target_strides[0] = word_bytes;
  part.source_strides[0] = word_bytes;
  return part;
}

/* Turns a copy into at most three that hold the same bytes in the largest words there are, and
 * returns how many. Only a plain run of bytes needs more than one: its ends are cut off where they
 * would force small words on the whole. */
int plan_words(const fdp_strided_copy *copy, word_copy parts[3]) {
  assert(copy->ndim >= 0 && copy->ndim <= FDP_COPY_MAX_DIMS && copy->item_bytes > 0);
  word_copy bytes = {static_cast<char *>(copy->target), static_cast<const char *>(copy->source), 1,
                     1, {copy->item_bytes}, {1}, {1}};
  for (int32_t d = copy->ndim - 1; d >= 0; --d) {
    assert(copy->shape[d] >= 0);
    if (copy->shape[d] == 0) return 0;
    if (copy->shape[d] == 1) continue;
    bytes.sizes[bytes.dim_count] = copy->shape[d];
    bytes.target_strides[bytes.dim_count] = copy->target_strides_bytes[d];
    bytes.source_strides[bytes.dim_count++] = copy->source_strides_bytes[d];
  }
  sort_dims(&bytes);
  merge_dims(&bytes);
  uint64_t target = reinterpret_cast<uint64_t>(bytes.target);
  uint64_t source = reinterpret_cast<uint64_t>(bytes.source);
  if (bytes.dim_count == 1) {
    int64_t size = bytes.sizes[0];
    uint32_t word_bytes = fdp_word_bytes(target ^ source);
    int64_t head = (int64_t)(-target & (word_bytes - 1));
    if (head > size) head = size;
    int64_t body = (size - head) / word_bytes * word_bytes, tail = size - head - body;
    int count = 0;
    if (body > 0) parts[count++] = run_part(&bytes, head, body, word_bytes);
    if (head > 0) parts[count++] = run_part(&bytes, 0, head, 1);
    if (tail > 0) parts[count++] = run_part(&bytes, head + body, tail, 1);
    return count;
  }
  uint64_t bits = target | source | (uint64_t)bytes.sizes[0];
  for (int d = 1; d < bytes.dim_count; ++d) {
    bits |= (uint64_t)bytes.target_strides[d] | (uint64_t)bytes.source_strides[d];
  }
  parts[0] = bytes;
  parts[0].word_bytes = fdp_word_bytes(bits);
  parts[0].sizes[0] /= parts[0].word_bytes;
  parts[0].target_strides[0] = parts[0].word_bytes;
  parts[0].source_strides[0] = parts[0].word_bytes;
  return 1;
}

copy_dim dim_of(int64_t size, int64_t target_stride, int64_t source_stride) {
  assert(size >= 2 && size <= MAX_WORDS);
  uint32_t shift = 0;
  while (((int64_t)1 << shift) < size) ++shift;
  uint64_t beyond = ((uint64_t)1 << shift) - (uint64_t)size;
  uint32_t magic = (uint32_t)((beyond << 32) / (uint64_t)size + 1);
  return {(uint32_t)size, magic, target_stride, source_stride};
}

/* Adds a copy of at most MAX_WORDS words to the table if there is room. */
bool plan_entry(copy_table *table, const word_copy *copy, int64_t count) {
  constexpr int64_t TILE = FDP_TILE_WORDS * FDP_TILE_THREADS;
  uint32_t tiles = (uint32_t)((count + TILE - 1) / TILE);
  if (table->entry_count == MAX_COPIES ||
      table->dim_count + copy->dim_count > MAX_TABLE_DIMS ||
      table->tile_count + tiles > FDP_MAX_TILES) {
    return false;
  }
  copy_entry *entry = &table->entries[table->entry_count];
  entry->target = copy->target;
  entry->source = copy->source;
  entry->word_count = (uint32_t)count;
  entry->word_bytes = (uint8_t)copy->word_bytes;
  entry->first_dim = (uint16_t)table->dim_count;
  for (int d = 0; d < copy->dim_count; ++d) {
    if (copy->sizes[d] == 1) continue;
    table->dims[table->dim_count++] =
        dim_of(copy->sizes[d], copy->target_strides[d], copy->source_strides[d]);
  }
  entry->dim_count = (uint8_t)(table->dim_count - entry->first_dim);
  table->first_tiles[table->entry_count++] = table->tile_count;
  table->tile_count += tiles;
  return true;
}

/* ---- the kernel ---- */

/* n / dim.size */
__device__ uint32_t divide(uint32_t n, const copy_dim &dim) {
  return (__umulhi(n, dim.magic) + n) >> (32 - __clz(dim.size - 1));
}

template <typename Word>
__device__ void copy_tile(const copy_entry &entry, const copy_dim *dims, uint32_t start) {
  Word words[FDP_TILE_WORDS];
  int64_t to[FDP_TILE_WORDS];
  int last = entry.dim_count - 1;
#pragma unroll
  for (int k = 0; k < FDP_TILE_WORDS; ++k) {
    uint32_t n = start + k * FDP_TILE_THREADS;
    if (n >= entry.word_count) continue;
    int64_t from = 0;
    to[k] = 0;
    for (int d = 0; d < last; ++d) {
      uint32_t quotient = divide(n, dims[d]);
      int64_t index = n - quotient * dims[d].size;
      to[k] += index * dims[d].target_stride;
      from += index * dims[d].source_stride;
      n = quotient;
    }
    if (last >= 0) { /* the outermost index is what is left; a single word has no dimension */
      to[k] += n * dims[last].target_stride;
      from += n * dims[last].source_stride;
    }
    words[k] = *reinterpret_cast<const Word *>(entry.source + from);
  }
#pragma unroll
  for (int k = 0; k < FDP_TILE_WORDS; ++k) {
    if (start + k * FDP_TILE_THREADS < entry.word_count) {
      *reinterpret_cast<Word *>(entry.target + to[k]) = words[k];
    }
  }
}

__global__ void __launch_bounds__(FDP_TILE_THREADS)
    copy_kernel(const __grid_constant__ copy_table table) {
  int32_t i = fdp_entry_of_tile(table.first_tiles, table.entry_count, blockIdx.x);
  const copy_entry &entry = table.entries[i];
  const copy_dim *dims = &table.dims[entry.first_dim];
  uint32_t tile = blockIdx.x - table.first_tiles[i];
  uint32_t start = tile * (FDP_TILE_WORDS * FDP_TILE_THREADS) + threadIdx.x;
  switch (entry.word_bytes) {
    case 16: copy_tile<uint4>(entry, dims, start); break;
    case 8: copy_tile<uint2>(entry, dims, start); break;
    case 4: copy_tile<uint32_t>(entry, dims, start); break;
    case 2: copy_tile<uint16_t>(entry, dims, start); break;
    default: copy_tile<uint8_t>(entry, dims, start);
  }
}

/* ---- the launcher ---- */

/* Launches what the table holds and empties it. */
int launch_table(copy_table *table, void *stream) {
  int error =
      table->entry_count > 0 ? fdp_launch(copy_kernel, *table, table->tile_count, stream) : 0;
  table->entry_count = 0;
  table->dim_count = 0;
  table->tile_count = 0;
  return error;
}

/* Puts a copy into the table, launching what is there when it is full. A copy of too many words is
 * halved along its outermost dimension. */
int add_copy(copy_table *table, const word_copy *copy, void *stream) {
  int64_t count = word_count(copy);
  if (count > MAX_WORDS) {
    int outer = copy->dim_count - 1;
    while (copy->sizes[outer] == 1) --outer;
    word_copy half = *copy;
    half.sizes[outer] = copy->sizes[outer] / 2;
    int error = add_copy(table, &half, stream);
    if (error != 0) return error;
    half.target += half.sizes[outer] * half.target_strides[outer];
    half.source += half.sizes[outer] * half.source_strides[outer];
    half.sizes[outer] = copy->sizes[outer] - half.sizes[outer];
    return add_copy(table, &half, stream);
  }
  if (plan_entry(table, copy, count)) return 0;
  int error = launch_table(table, stream);
  bool added = plan_entry(table, copy, count);
  assert(added);
  (void)added;
  return error;
}

}  // namespace

extern "C" int fdp_cuda_copy_strided(const fdp_strided_copy *copies, int32_t copy_count,
                                     void *stream) {
  assert(copy_count >= 0);
  copy_table table;
  table.entry_count = 0;
  table.dim_count = 0;
  table.tile_count = 0;
  for (int32_t i = 0; i < copy_count; ++i) {
    word_copy parts[3];
    int part_count = plan_words(&copies[i], parts);
    for (int part = 0; part < part_count; ++part) {
      int error = add_copy(&table, &parts[part], stream);
      if (error != 0) return error;
    }
  }
  return launch_table(&table, stream);
}
