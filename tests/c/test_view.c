/* Views: every refusal, and density, overlap and extent against a slow look at every element. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/view.h"
#include "check.h"
#include "rig.h"

static fdp_view view_of(int32_t ndim, const int64_t *shape, const int64_t *strides) {
  static _Alignas(64) char memory[64];
  fdp_view view = {.data = memory, .device = host, .dtype = float32, .ndim = ndim};
  for (int32_t d = 0; d < ndim && d < FDP_MAX_DIMS; ++d) {
    view.shape[d] = shape[d];
    view.strides[d] = strides[d];
  }
  return view;
}

static void test_refuses(void) {
  const int64_t big = INT64_C(1) << 40;
  fdp_view view = view_of(1, (int64_t[]){3}, (int64_t[]){1});
  CHECK_OK(fdp_view_check(&view, "x"));
  view.ndim = 65;
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT,
              "x: number of dimensions is 65, must be 0 to 64");
  view.ndim = -1;
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT,
              "x: number of dimensions is -1, must be 0 to 64");
  view = view_of(2, (int64_t[]){0, -2}, (int64_t[]){1, 1});
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT,
              "x: size of dimension 1 is -2, must not be negative");
  view = view_of(2, (int64_t[]){big, big}, (int64_t[]){0, 0});
  CHECK_FAILS(fdp_view_check(&view, "targets[2]"), FDP_INVALID_ARGUMENT,
              "targets[2]: number of elements overflows at dimension 1 of size 1099511627776, must "
              "be at most 9223372036854775807");
  view = view_of(1, (int64_t[]){INT64_MAX / 2}, (int64_t[]){0});
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT,
              "x: size of 4611686018427387903 elements of 4 bytes overflows, must be at most "
              "9223372036854775807 bytes");
  view = view_of(1, (int64_t[]){3}, (int64_t[]){INT64_MAX / 8});
  CHECK_OK(fdp_view_check(&view, "x")); /* 2 * that * 4 bytes, and 4 more, just fit */
  view = view_of(1, (int64_t[]){3}, (int64_t[]){INT64_MAX / 8 + 1});
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT,
              "x: address range overflows at dimension 0 of size 3 and stride 1152921504606846976, "
              "must be at most 9223372036854775807 bytes");
  view = view_of(1, (int64_t[]){2}, (int64_t[]){INT64_MIN});
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT, NULL);
  view = view_of(1, (int64_t[]){2}, (int64_t[]){-INT64_MAX / 8});
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT, NULL);
  CHECK(strstr(fdp_last_message(), "leave the address space") != NULL);
  view = view_of(1, (int64_t[]){3}, (int64_t[]){1});
  view.data = NULL;
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT,
              "x: data is NULL, but there are 3 elements");
  view.shape[0] = 0;
  CHECK_OK(fdp_view_check(&view, "x"));
  view = view_of(1, (int64_t[]){3}, (int64_t[]){1});
  view.dtype = (fdp_dtype){FDP_CODE_UINT, 4, 1};
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_TYPE,
              "x: elements of dtype(1,4,1) are 4 bits, must fill whole bytes");
  view = view_of(1, (int64_t[]){3}, (int64_t[]){1});
  view.data = (char *)view.data + 2;
  CHECK_FAILS(fdp_view_check(&view, "x"), FDP_INVALID_ARGUMENT, NULL);
  CHECK(strstr(fdp_last_message(), "is not aligned, must be a multiple of 4 bytes") != NULL);
  view.dtype = (fdp_dtype){FDP_CODE_COMPLEX, 32, 1}; /* aligned as its halves */
  CHECK_OK(fdp_view_check(&view, "x"));
  view.dtype = (fdp_dtype){FDP_CODE_FLOAT, 8, 3};
  view.data = (char *)view.data + 1;
  CHECK_OK(fdp_view_check(&view, "x"));
}

/* --- against a slow look at every element --- */

enum { SLOW_BYTES = 4096 };

/* Counts, per byte of a window around data, how many elements lie there. */
static int64_t look(const fdp_view *view, unsigned char *touched) {
  memset(touched, 0, SLOW_BYTES);
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(view->dtype);
  int64_t count = fdp_view_count_elems(view);
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = (char *)rig_address(view, i) - (char *)view->data + SLOW_BYTES / 2;
    for (int64_t b = 0; b < item_bytes; ++b) touched[at + b] += 1;
  }
  return count;
}

static void test_against_slow(void) {
  static char memory[SLOW_BYTES];
  static const int64_t sizes[] = {0, 1, 2, 3};
  static const int64_t strides[] = {0, 1, 2, 3, 6, -1, -3};
  unsigned char touched[SLOW_BYTES];
  for (int64_t number = 0; number < 28 * 28 * 28; ++number) {
    int64_t rest = number;
    fdp_view view = {.data = memory + SLOW_BYTES / 2, .device = host, .dtype = uint8, .ndim = 3};
    for (int32_t d = 0; d < 3; ++d, rest /= 28) {
      view.shape[d] = sizes[rest % 4];
      view.strides[d] = strides[rest % 28 / 4];
    }
    check_case("view %d", (int)number);
    int64_t count = look(&view, touched);
    int64_t low = SLOW_BYTES, high = 0, most = 0;
    bool has_hole = false, starts_lowest = true;
    for (int64_t i = 0; i < SLOW_BYTES; ++i) {
      if (!touched[i]) continue;
      if (i < low) low = i;
      high = i + 1;
      if (touched[i] > most) most = touched[i];
    }
    for (int64_t i = low; i < high; ++i) has_hole |= touched[i] == 0;
    starts_lowest = low == SLOW_BYTES / 2;
    const char *begin, *end;
    fdp_view_extent(&view, &begin, &end);
    bool fits = count == 0 ? begin == end
                           : begin == memory + low && end == memory + high;
    bool dense = count == 0 || (!has_hole && most == 1 && starts_lowest);
    bool overlaps = most > 1;
    bool right = fits && fdp_view_is_dense(&view) == dense &&
                 (fdp_view_overlaps_itself(&view) || !overlaps) &&
                 (!dense || !fdp_view_overlaps_itself(&view));
    CHECK(right && "extent, density and overlap");
  }
  check_case("%s", "");
}

/* Pairs of small matrices in one window: whoever shares a byte is found; columns, rows and blocks
 * side by side are told apart. */
static void test_overlap_of_two(void) {
  static _Alignas(64) char memory[SLOW_BYTES];
  unsigned char touched[2][SLOW_BYTES];
  int64_t sides = 0;
  for (int32_t number = 0; number < 4 * 4 * 4 * 4 * 16 * 2; ++number) {
    int32_t rest = number;
    fdp_view views[2];
    for (int32_t v = 0; v < 2; ++v) {
      views[v] = (fdp_view){.device = host, .dtype = uint8, .ndim = 2, .shape = {1 + rest % 4, 0},
                            .strides = {4, 1}};
      rest /= 4;
      views[v].shape[1] = 1 + rest % 4;
      rest /= 4;
    }
    int64_t offset = rest % 16;
    if (rest / 16 == 1) { /* the second upside down */
      views[1].strides[0] = -4;
      offset += (views[1].shape[0] - 1) * 4;
    }
    views[0].data = memory + SLOW_BYTES / 2;
    views[1].data = memory + SLOW_BYTES / 2 + offset;
    look(&views[0], touched[0]);
    look(&views[1], touched[1]);
    bool shares = false;
    for (int64_t i = offset; i < SLOW_BYTES; ++i) {
      shares |= touched[0][i] && touched[1][i - offset];
    }
    /* Wrapped columns: neither is one range within a row of the other. */
    bool told = views[0].shape[0] > 1 && views[1].shape[0] > 1 && views[1].shape[1] <= 4 &&
                offset % 4 + views[1].shape[1] <= 4;
    bool overlaps = fdp_views_overlap(&views[0], &views[1]);
    check_case("pair %d", number);
    CHECK(overlaps || !shares);
    if (told) CHECK_EQUAL(overlaps, shares);
    sides += told && !shares;
    CHECK_EQUAL(fdp_views_overlap(&views[1], &views[0]), overlaps);
  }
  check_case("%s", "");
  CHECK(sides > 100);
}

static void test_rest(void) {
  fdp_view rows = view_of(3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1});
  fdp_view columns = view_of(3, (int64_t[]){2, 3, 4}, (int64_t[]){1, 2, 6});
  fdp_view backwards = view_of(1, (int64_t[]){4}, (int64_t[]){-1});
  CHECK(fdp_view_is_contiguous(&rows));
  CHECK(!fdp_view_is_contiguous(&columns));
  CHECK(fdp_view_is_dense(&columns));
  CHECK(!fdp_view_is_dense(&backwards)); /* data is not its first byte */
  CHECK(fdp_view_same_shape(&rows, &columns));
  CHECK(!fdp_view_same_layout(&rows, &columns));
  fdp_view ones = view_of(3, (int64_t[]){1, 3, 1}, (int64_t[]){99, 1, -7});
  fdp_view other_ones = view_of(3, (int64_t[]){1, 3, 1}, (int64_t[]){3, 1, 1});
  CHECK(fdp_view_same_layout(&ones, &other_ones));
  CHECK(fdp_view_is_contiguous(&ones));
  fdp_view scalar = view_of(0, NULL, NULL);
  CHECK_EQUAL(fdp_view_count_elems(&scalar), 1);
  CHECK_EQUAL(fdp_view_size_bytes(&scalar), 4);
  CHECK_OK(fdp_view_check(&scalar, "x"));
  /* Sizes that multiply past the end are fine when there is nothing. */
  fdp_view empty = view_of(3, (int64_t[]){INT64_MAX, INT64_MAX, 0},
                           (int64_t[]){INT64_MAX, INT64_MIN, 3});
  CHECK_OK(fdp_view_check(&empty, "x"));
  CHECK_EQUAL(fdp_view_count_elems(&empty), 0);
  CHECK(fdp_view_is_contiguous(&empty) && fdp_view_is_dense(&empty));
  CHECK(!fdp_view_overlaps_itself(&empty) && !fdp_views_overlap(&empty, &rows));
  fdp_view part = fdp_view_narrow(&rows, 1, 2, 1);
  CHECK_EQUAL((char *)part.data - (char *)rows.data, 2 * 4 * 4);
  CHECK_EQUAL(part.shape[1], 1);
  CHECK_EQUAL(part.strides[0], 12);
  part = fdp_view_narrow(&rows, 0, 2, 0);
  CHECK_EQUAL(fdp_view_count_elems(&part), 0);
  CHECK(fdp_views_overlap(&rows, &columns));
  columns.device = (fdp_device_id){FDP_DEVICE_CUDA, 0};
  CHECK(!fdp_views_overlap(&rows, &columns));
  columns.device = (fdp_device_id){FDP_DEVICE_CUDA_PINNED, 3};
  CHECK(fdp_views_overlap(&rows, &columns));
  columns.data = (char *)rows.data + 24 * 4;
  CHECK(!fdp_views_overlap(&rows, &columns));
  char text[40];
  CHECK_TEXT(fdp_view_shape_text(&rows, text, sizeof text), "(2, 3, 4)");
  CHECK_TEXT(fdp_view_shape_text(&backwards, text, sizeof text), "(4,)");
  CHECK_TEXT(fdp_view_shape_text(&scalar, text, sizeof text), "()");
  CHECK_TEXT(fdp_view_shape_text(&rows, text, 6), "(2, 3");
  CHECK_TEXT(fdp_device_text(host, text, sizeof text), "cpu:0");
  CHECK_TEXT(fdp_device_text((fdp_device_id){FDP_DEVICE_CUDA, 2}, text, sizeof text), "cuda:2");
  CHECK_TEXT(fdp_device_text(columns.device, text, sizeof text), "pinned:3");
  CHECK_TEXT(fdp_device_text((fdp_device_id){9, 1}, text, sizeof text), "device(9,1)");
}

void test_view(void) {
  test_refuses();
  test_against_slow();
  test_overlap_of_two();
  test_rest();
}
