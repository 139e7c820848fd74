/* Sums of any number of sources in their order, many sums in one launch. The sources may lie on
 * other GPUs whose memory this one maps. Each thread adds up its own elements in registers, so no
 * two threads meet, the order is fixed, and the target may be one of the sources. */
#include "kernels.h"

#include <assert.h>
#include <cuda_fp16.h>

#include "tile.cuh"

namespace {

/* ---- lanes: how a 32- or 64-bit piece of a word is added up ---- */

/* `piece` is what a lane is loaded as, `total` what it becomes while it is added up, and `small` is
 * the element, for what has no alignment of 16 bytes. Pieces hold several small elements. */
struct lane_f64 {
  typedef double piece, total, small;
  static __device__ double widen(double x) { return x; }
  static __device__ double add(double a, double b) { return a + b; }
  static __device__ double round(double a) { return a; }
};

struct lane_f32 {
  typedef float piece, total, small;
  static __device__ float widen(float x) { return x; }
  static __device__ float add(float a, float b) { return a + b; }
  static __device__ float round(float a) { return a; }
};

struct lane_f16 {
  typedef __half2 piece;
  typedef float2 total;
  typedef __half small;
  static __device__ float2 widen(__half2 x) { return __half22float2(x); }
  static __device__ float widen(__half x) { return __half2float(x); }
  static __device__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
  static __device__ float add(float a, float b) { return a + b; }
  static __device__ __half2 round(float2 a) { return __float22half2_rn(a); }
  static __device__ __half round(float a) { return __float2half_rn(a); }
};

/* bf16 is the upper half of an fp32. The conversions are written out, since cuda_bf16.h has them
 * for every architecture only in newer toolkits. */
struct lane_bf16 {
  typedef uint32_t piece;
  typedef float2 total;
  typedef uint16_t small;
  static __device__ float2 widen(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }
  static __device__ float widen(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }
  static __device__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
  static __device__ float add(float a, float b) { return a + b; }
#if __CUDA_ARCH__ >= 800
  static __device__ uint32_t round(float2 a) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(a.y), "f"(a.x));
    return pair;
  }
  static __device__ uint16_t round(float a) { return (uint16_t)round(make_float2(a, 0)); }
#else
  /* To nearest even; a NaN on its own, since rounding would carry it into another number. */
  static __device__ uint16_t round(float a) {
    uint32_t bits = __float_as_uint(a);
    return a != a ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static __device__ uint32_t round(float2 a) { return round(a.x) | (uint32_t)round(a.y) << 16; }
#endif
};

struct lane_u64 {
  typedef uint64_t piece, total, small;
  static __device__ uint64_t widen(uint64_t x) { return x; }
  static __device__ uint64_t add(uint64_t a, uint64_t b) { return a + b; }
  static __device__ uint64_t round(uint64_t a) { return a; }
};

struct lane_u32 {
  typedef uint32_t piece, total, small;
  static __device__ uint32_t widen(uint32_t x) { return x; }
  static __device__ uint32_t add(uint32_t a, uint32_t b) { return a + b; }
  static __device__ uint32_t round(uint32_t a) { return a; }
};

/* Several small integers in one 32-bit word: __vadd2 and __vadd4 let each of them wrap alone. */
struct lane_u16 {
  typedef uint32_t piece, total;
  typedef uint16_t small;
  template <typename T>
  static __device__ T widen(T x) { return x; }
  static __device__ uint32_t add(uint32_t a, uint32_t b) { return __vadd2(a, b); }
  static __device__ uint16_t add(uint16_t a, uint16_t b) { return (uint16_t)(a + b); }
  template <typename T>
  static __device__ T round(T a) { return a; }
};

struct lane_u8 {
  typedef uint32_t piece, total;
  typedef uint8_t small;
  template <typename T>
  static __device__ T widen(T x) { return x; }
  static __device__ uint32_t add(uint32_t a, uint32_t b) { return __vadd4(a, b); }
  static __device__ uint8_t add(uint8_t a, uint8_t b) { return (uint8_t)(a + b); }
  template <typename T>
  static __device__ T round(T a) { return a; }
};

/* Any byte but zero is true, and true is written as one. */
struct lane_bool {
  typedef uint32_t piece, total;
  typedef uint8_t small;
  template <typename T>
  static __device__ T widen(T x) { return x; }
  template <typename T>
  static __device__ T add(T a, T b) { return a | b; }
  static __device__ uint32_t round(uint32_t a) { return __vcmpne4(a, 0) & 0x01010101u; }
  static __device__ uint8_t round(uint8_t a) { return a != 0; }
};

/* One source is copied, as bits: the lane of unsigned integers of the same size. */
template <int SIZE_BYTES> struct bits_of;
template <> struct bits_of<1> { typedef lane_u8 lane; };
template <> struct bits_of<2> { typedef lane_u16 lane; };
template <> struct bits_of<4> { typedef lane_u32 lane; };
template <> struct bits_of<8> { typedef lane_u64 lane; };

/* ---- the table ---- */

constexpr int32_t MAX_SUMS = 96;
constexpr int32_t MAX_ADDRESSES = 264;
/* Of a sum over a link: enough to fill it (a megabyte in flight), on half as many multiprocessors
 * as a large GPU has. Without the bound, sums of 500 MB of gradients held up the backward that they
 * ran beside by 0.6 ms (two H200, GPT-2 of 124M, 34.5 against 33.9 ms a step). */
constexpr uint32_t LINK_BLOCKS = 64;

/* `first_address` is the target's, then come those of the sources that are not NULL. If all of them
 * are alike modulo 16, words of 16 bytes begin `head_bytes` in; else there are no words. */
struct sum_entry {
  int64_t size_bytes;
  uint16_t first_address;
  uint16_t source_count;
  uint8_t has_words;
  uint8_t head_bytes;
};

struct sum_table {
  char *addresses[MAX_ADDRESSES];
  sum_entry entries[MAX_SUMS];
  uint32_t first_tiles[MAX_SUMS];
  int32_t entry_count;
  int32_t address_count;
  uint32_t tile_count;
  bool over_link; /* one of them is */
};
static_assert(sizeof(sum_table) <= FDP_PARAMETER_BYTES, "a kernel's parameters are too large");
static_assert(FDP_MAX_REPLICAS < MAX_ADDRESSES, "a sum must fit into one launch");

/* ---- the kernel ---- */

/* A 16-byte word as an array of pieces. */
template <typename Lane>
struct alignas(16) sum_word {
  static constexpr int COUNT = 16 / sizeof(typename Lane::piece);
  typename Lane::piece pieces[COUNT];
};

constexpr int64_t STRIDE_BYTES = 16 * FDP_TILE_THREADS;

/* A thread's words of one array, a stride of the block apart. BOUNDED at the end of an array. */
template <typename Lane, bool BOUNDED>
__device__ void load_words(sum_word<Lane> *words, const char *source, int64_t at, int64_t end) {
#pragma unroll
  for (int k = 0; k < FDP_TILE_WORDS; ++k) {
    int64_t place = at + k * STRIDE_BYTES;
    if (!BOUNDED || place < end) {
      words[k] = *reinterpret_cast<const sum_word<Lane> *>(source + place);
    }
  }
}

template <typename Lane, bool BOUNDED>
__device__ void sum_words(char *const *addresses, uint32_t source_count, int64_t at, int64_t end) {
  constexpr int COUNT = sum_word<Lane>::COUNT;
  sum_word<Lane> words[FDP_TILE_WORDS] = {};
  typename Lane::total totals[FDP_TILE_WORDS][COUNT];
  load_words<Lane, BOUNDED>(words, addresses[1], at, end);
#pragma unroll
  for (int k = 0; k < FDP_TILE_WORDS; ++k) {
#pragma unroll
    for (int p = 0; p < COUNT; ++p) totals[k][p] = Lane::widen(words[k].pieces[p]);
  }
  for (uint32_t i = 2; i <= source_count; ++i) {
    load_words<Lane, BOUNDED>(words, addresses[i], at, end);
#pragma unroll
    for (int k = 0; k < FDP_TILE_WORDS; ++k) {
#pragma unroll
      for (int p = 0; p < COUNT; ++p) {
        totals[k][p] = Lane::add(totals[k][p], Lane::widen(words[k].pieces[p]));
      }
    }
  }
#pragma unroll
  for (int k = 0; k < FDP_TILE_WORDS; ++k) {
#pragma unroll
    for (int p = 0; p < COUNT; ++p) words[k].pieces[p] = Lane::round(totals[k][p]);
    int64_t place = at + k * STRIDE_BYTES;
    if (!BOUNDED || place < end) {
      *reinterpret_cast<sum_word<Lane> *>(addresses[0] + place) = words[k];
    }
  }
}

/* Element by element, for what is not a whole word. */
template <typename Lane>
__device__ void sum_smalls(char *const *addresses, uint32_t source_count, int64_t begin,
                           int64_t end) {
  typedef typename Lane::small small;
  constexpr int64_t STEP = sizeof(small) * FDP_TILE_THREADS;
  for (int64_t at = begin + threadIdx.x * (int64_t)sizeof(small); at < end; at += STEP) {
    auto total = Lane::widen(*reinterpret_cast<const small *>(addresses[1] + at));
    for (uint32_t i = 2; i <= source_count; ++i) {
      auto next = Lane::widen(*reinterpret_cast<const small *>(addresses[i] + at));
      total = Lane::add(total, next);
    }
    *reinterpret_cast<small *>(addresses[0] + at) = Lane::round(total);
  }
}

template <typename Lane>
__device__ void sum_tile(const sum_entry &entry, char *const *addresses, uint32_t tile) {
  int64_t start = (int64_t)tile * FDP_TILE_BYTES, size = entry.size_bytes;
  uint32_t count = entry.source_count;
  if (!entry.has_words) {
    int64_t end = start + FDP_TILE_BYTES;
    sum_smalls<Lane>(addresses, count, start, end < size ? end : size);
    return;
  }
  int64_t head = entry.head_bytes < size ? entry.head_bytes : size;
  int64_t end = head + (size - head) / 16 * 16;
  if (tile == 0) sum_smalls<Lane>(addresses, count, 0, head);
  if (start + FDP_TILE_BYTES >= size) sum_smalls<Lane>(addresses, count, end, size);
  int64_t at = head + start + 16 * threadIdx.x;
  if (head + start + FDP_TILE_BYTES <= end) {
    sum_words<Lane, false>(addresses, count, at, end);
  } else {
    sum_words<Lane, true>(addresses, count, at, end);
  }
}

template <typename Lane>
__global__ void __launch_bounds__(FDP_TILE_THREADS)
    sum_kernel(const __grid_constant__ sum_table table) {
  for (uint32_t at = blockIdx.x; at < table.tile_count; at += gridDim.x) {
    int32_t i = fdp_entry_of_tile(table.first_tiles, table.entry_count, at);
    const sum_entry &entry = table.entries[i];
    char *const *addresses = &table.addresses[entry.first_address];
    uint32_t tile = at - table.first_tiles[i];
    if (entry.source_count == 1) {
      sum_tile<typename bits_of<sizeof(typename Lane::small)>::lane>(entry, addresses, tile);
    } else {
      sum_tile<Lane>(entry, addresses, tile);
    }
  }
}

/* ---- the launcher ---- */

typedef void (*sum_function)(sum_table);

/* The kernel of a dtype, and the bytes of one of its lanes: a complex number is two. */
sum_function kernel_of(fdp_dtype dtype, int64_t *small_bytes) {
  assert(dtype.lanes == 1);
  bool is_complex = dtype.code == FDP_CODE_COMPLEX;
  *small_bytes = dtype.bits / (is_complex ? 16 : 8);
  switch (dtype.code) {
    case FDP_CODE_BOOL: return sum_kernel<lane_bool>;
    case FDP_CODE_BFLOAT: return sum_kernel<lane_bf16>;
    case FDP_CODE_FLOAT:
    case FDP_CODE_COMPLEX:
      if (*small_bytes == 8) return sum_kernel<lane_f64>;
      if (*small_bytes == 4) return sum_kernel<lane_f32>;
      assert(*small_bytes == 2);
      return sum_kernel<lane_f16>;
    default:
      assert(dtype.code == FDP_CODE_INT || dtype.code == FDP_CODE_UINT);
      if (*small_bytes == 8) return sum_kernel<lane_u64>;
      if (*small_bytes == 4) return sum_kernel<lane_u32>;
      if (*small_bytes == 2) return sum_kernel<lane_u16>;
      assert(*small_bytes == 1);
      return sum_kernel<lane_u8>;
  }
}

int32_t live_source_count(const fdp_sum *sum) {
  int32_t count = 0;
  for (int32_t i = 0; i < sum->source_count; ++i) count += sum->sources[i] != nullptr;
  return count;
}

/* Adds a sum of `size_bytes` to the table if there is room. Pure. */
bool plan_entry(sum_table *table, const fdp_sum *sum, int64_t size_bytes, int64_t small_bytes) {
  int32_t live_count = live_source_count(sum);
  int64_t tiles = (size_bytes + FDP_TILE_BYTES - 1) / FDP_TILE_BYTES;
  assert(tiles <= FDP_MAX_TILES);
  if (table->entry_count == MAX_SUMS || table->address_count + 1 + live_count > MAX_ADDRESSES ||
      table->tile_count + tiles > FDP_MAX_TILES) {
    return false;
  }
  sum_entry *entry = &table->entries[table->entry_count];
  char **addresses = &table->addresses[table->address_count];
  uint64_t target = reinterpret_cast<uint64_t>(sum->target), differences = 0;
  addresses[0] = static_cast<char *>(sum->target);
  entry->source_count = 0;
  for (int32_t i = 0; i < sum->source_count; ++i) {
    if (sum->sources[i] == nullptr) continue;
    addresses[++entry->source_count] = static_cast<char *>(const_cast<void *>(sum->sources[i]));
    differences |= reinterpret_cast<uint64_t>(sum->sources[i]) ^ target;
  }
  assert(target % (uint64_t)small_bytes == 0 && differences % (uint64_t)small_bytes == 0);
  (void)small_bytes;
  entry->size_bytes = size_bytes;
  entry->first_address = (uint16_t)table->address_count;
  entry->has_words = fdp_word_bytes(differences) == 16;
  entry->head_bytes = (uint8_t)(-target & 15);
  table->first_tiles[table->entry_count++] = table->tile_count;
  table->address_count += 1 + live_count;
  table->tile_count += (uint32_t)tiles;
  table->over_link |= sum->over_link;
  return true;
}

void clear_table(sum_table *table) {
  table->entry_count = 0;
  table->address_count = 0;
  table->tile_count = 0;
  table->over_link = false;
}

/* Launches what the table holds and empties it. */
int launch_table(sum_function kernel, sum_table *table, void *stream) {
  uint32_t blocks = table->tile_count;
  if (table->over_link && blocks > LINK_BLOCKS) blocks = LINK_BLOCKS;
  int error = table->entry_count > 0 ? fdp_launch(kernel, *table, blocks, stream) : 0;
  clear_table(table);
  return error;
}

}  // namespace

extern "C" int fdp_cuda_sum(const fdp_sum *sums, int32_t sum_count, void *stream) {
  assert(sum_count >= 0);
  sum_table table;
  clear_table(&table);
  sum_function kernel = nullptr;
  for (int32_t i = 0; i < sum_count; ++i) {
    const fdp_sum *sum = &sums[i];
    assert(sum->source_count >= 1 && sum->source_count <= FDP_MAX_REPLICAS);
    assert(sum->count_elems >= 0);
    int64_t small_bytes;
    sum_function next = kernel_of(sum->dtype, &small_bytes);
    int64_t size_bytes = sum->count_elems * (sum->dtype.bits / 8);
    if (size_bytes == 0) continue;
    if (live_source_count(sum) == 0) {
      /* By a kernel: the target may be another GPU's memory, and kernels are what peers are checked
       * for (csrc/peer_check.h). */
      const fdp_segment zeros = {nullptr, 0, size_bytes};
      int error = fdp_cuda_pack(sum->target, &zeros, 1, stream);
      if (error != 0) return error;
      continue;
    }
    /* Another kernel or a full table: what is there goes first. An empty table takes any sum. */
    if (next != kernel || !plan_entry(&table, sum, size_bytes, small_bytes)) {
      int error = launch_table(kernel, &table, stream);
      if (error != 0) return error;
      kernel = next;
      bool added = plan_entry(&table, sum, size_bytes, small_bytes);
      assert(added);
      (void)added;
    }
  }
  return launch_table(kernel, &table, stream);
}
