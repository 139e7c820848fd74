/* Views: what fdp_view_check lets through can be walked without overflow, and what the functions of
 * view.h say of small views is what looking at every element says. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

#define ARENA_BYTES 512
#define MOST_ELEMS 48

static char arena[ARENA_BYTES] __attribute__((aligned(64)));

/* Bytes of the arena that the view's elements touch, each as often as it is touched. */
static void touch(const fdp_view *view, uint16_t *touched) {
  int64_t count = fdp_view_count_elems(view);
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  memset(touched, 0, ARENA_BYTES * sizeof *touched);
  for (int64_t i = 0; i < count; ++i) {
    const char *item = (const char *)view->data + fuzz_offset_of(view, i);
    FUZZ_CHECK(item >= arena && item + item_bytes <= arena + ARENA_BYTES);
    for (int64_t b = 0; b < item_bytes; ++b) touched[item - arena + b] += 1;
  }
}

static void look_at_one(const fdp_view *view, const uint16_t *touched) {
  const char *begin, *end;
  fdp_view_extent(view, &begin, &end);
  bool is_empty = fdp_view_count_elems(view) == 0;
  FUZZ_CHECK((begin == end) == is_empty);
  if (is_empty) return;
  int64_t first = 0, last = ARENA_BYTES - 1, most = 0, holes = 0;
  while (touched[first] == 0) ++first;
  while (touched[last] == 0) --last;
  FUZZ_CHECK(begin == arena + first && end == arena + last + 1);
  for (int64_t b = first; b <= last; ++b) {
    if (touched[b] > most) most = touched[b];
    if (touched[b] == 0) ++holes;
  }
  if (!fdp_view_overlaps_itself(view)) FUZZ_CHECK(most == 1);
  if (fdp_view_is_dense(view)) FUZZ_CHECK(most == 1 && holes == 0 && begin == view->data);
  if (fdp_view_is_contiguous(view)) {
    FUZZ_CHECK(fdp_view_is_dense(view));
    int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
    for (int64_t i = 0; i < fdp_view_count_elems(view); ++i) {
      FUZZ_CHECK(fuzz_offset_of(view, i) == i * item_bytes);
    }
  }
}

static void look_at_tame(fuzz_bytes *bytes) {
  static uint16_t touched[2][ARENA_BYTES];
  fdp_view views[2];
  for (int i = 0; i < 2; ++i) {
    int64_t shape[8];
    fdp_dtype dtype = fuzz_dtype(bytes);
    if (fdp_dtype_bytes(dtype) == 0 || fdp_dtype_bytes(dtype) > 16) return;
    int32_t ndim = fuzz_shape(bytes, MOST_ELEMS, shape);
    views[i] = fuzz_tame_view(bytes, dtype, shape, ndim, arena, ARENA_BYTES);
    if (fdp_view_check(&views[i], "view") != FDP_OK) return; /* not aligned: an odd dtype */
    touch(&views[i], touched[i]);
    look_at_one(&views[i], touched[i]);
  }
  bool meet = false;
  for (int64_t b = 0; b < ARENA_BYTES; ++b) meet |= touched[0][b] > 0 && touched[1][b] > 0;
  if (meet) FUZZ_CHECK(fdp_views_overlap(&views[0], &views[1]));
  FUZZ_CHECK(fdp_views_overlap(&views[0], &views[1]) == fdp_views_overlap(&views[1], &views[0]));
  if (fdp_view_same_layout(&views[0], &views[1])) {
    FUZZ_CHECK(fdp_view_same_shape(&views[0], &views[1]));
  }
}

static void look_at_wild(fuzz_bytes *bytes) {
  fdp_view views[2];
  char text[64];
  for (int i = 0; i < 2; ++i) {
    views[i] = fuzz_wild_view(bytes);
    if (fdp_view_check(&views[i], "view") != FDP_OK) {
      FUZZ_CHECK(*fdp_last_message() != '\0');
      return;
    }
    const char *begin, *end;
    fdp_view_extent(&views[i], &begin, &end);
    int64_t size_bytes = fdp_view_size_bytes(&views[i]);
    FUZZ_CHECK(size_bytes >= 0 && begin <= end);
    if (!fdp_view_overlaps_itself(&views[i])) FUZZ_CHECK(end - begin >= size_bytes);
    if (fdp_view_is_dense(&views[i])) FUZZ_CHECK(end - begin == size_bytes);
    fdp_view_shape_text(&views[i], text, (size_t)fuzz_below(bytes, (int32_t)sizeof text));
    fdp_device_text(views[i].device, text, sizeof text);
    for (int32_t d = 0; d < views[i].ndim; ++d) {
      if (views[i].shape[d] == 0) continue;
      int64_t half = views[i].shape[d] / 2;
      fdp_view part = fdp_view_narrow(&views[i], d, half, views[i].shape[d] - half);
      const char *part_begin, *part_end;
      FUZZ_CHECK(fdp_view_check(&part, "part") == FDP_OK);
      fdp_view_extent(&part, &part_begin, &part_end);
      if (part_begin < part_end) FUZZ_CHECK(part_begin >= begin && part_end <= end);
    }
  }
  FUZZ_CHECK(fdp_views_overlap(&views[0], &views[1]) == fdp_views_overlap(&views[1], &views[0]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes) {
  fuzz_bytes bytes = {data, size_bytes};
  if (fuzz_byte(&bytes) % 2 == 0) {
    look_at_tame(&bytes);
  } else {
    look_at_wild(&bytes);
  }
  return 0;
}
