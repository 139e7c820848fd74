/* Plans: carried out by the reference kernel and compared element by element; merging; chunks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/plan.h"
#include "check.h"
#include "rig.h"

/* Random views of one shape: sorted and unsorted, with gaps, negative, and zero strides for
 * sources. */
static void random_view(fdp_view *view, int32_t ndim, const int64_t *shape, bool is_source,
                        char *memory, int64_t *used) {
  int32_t order[FDP_MAX_DIMS];
  *view = (fdp_view){.device = host, .dtype = uint8, .ndim = ndim};
  for (int32_t d = 0; d < ndim; ++d) order[d] = d;
  for (int32_t d = ndim - 1; d > 0; --d) {
    int32_t other = rand() % (d + 1), kept = order[d];
    if (rand() % 2) continue;
    order[d] = order[other];
    order[other] = kept;
  }
  int64_t stride = 1, origin = 0;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    int32_t d = order[i];
    view->shape[d] = shape[d];
    view->strides[d] = stride;
    if (is_source && rand() % 5 == 0) {
      view->strides[d] = 0;
      continue;
    }
    if (rand() % 4 == 0) {
      view->strides[d] = -stride;
      if (shape[d] > 0) origin += (shape[d] - 1) * stride;
    }
    stride *= shape[d] > 0 ? shape[d] : 1;
    if (rand() % 4 == 0) stride += 1;
  }
  *used = stride + 1;
  view->data = memory + origin;
}

static void test_random_plans(void) {
  enum { MEMORY = 1 << 20 };
  char *source_memory = malloc(MEMORY), *target_memory = malloc(MEMORY);
  for (int i = 0; i < MEMORY; ++i) source_memory[i] = (char)(i * 31 + i / 251);
  srand(7);
  for (int round = 0; round < 1500; ++round) {
    int64_t shape[12], used = 0;
    int32_t ndim = rand() % 11;
    for (int32_t d = 0; d < ndim; ++d) shape[d] = rand() % 40 == 0 ? 0 : 1 + rand() % 3;
    fdp_view source, target;
    random_view(&source, ndim, shape, true, source_memory, &used);
    random_view(&target, ndim, shape, false, target_memory, &used);
    if (used > MEMORY) continue;
    memset(target_memory, 0, (size_t)used);
    check_case("plan %d", round);
    fdp_copy_list list;
    fdp_copy_list_init(&list);
    CHECK_OK(fdp_plan_copy(&list, &target, &source));
    CHECK_EQUAL(list.size_bytes, fdp_view_size_bytes(&target));
    bool fits = true;
    int64_t planned = 0;
    for (int32_t i = 0; i < list.count; ++i) {
      int64_t count = list.copies[i].item_bytes;
      fits &= list.copies[i].ndim <= FDP_COPY_MAX_DIMS;
      for (int32_t d = 0; d < list.copies[i].ndim; ++d) count *= list.copies[i].shape[d];
      planned += count;
    }
    CHECK(fits);
    CHECK_EQUAL(planned, list.size_bytes);
    CHECK_EQUAL(fdp_ref_copy_strided(list.copies, list.count, NULL), 0);
    fdp_copy_list_drop(&list);
    int64_t wrong = 0, count = fdp_view_count_elems(&target);
    for (int64_t i = 0; i < count; ++i) {
      char *copied = rig_address(&target, i), *original = rig_address(&source, i);
      wrong += *copied != *original;
      *copied = 0;
    }
    for (int64_t i = 0; i < used; ++i) wrong += target_memory[i] != 0; /* nothing else written */
    CHECK_EQUAL(wrong, 0);
  }
  check_case("%s", "");
  free(source_memory);
  free(target_memory);
}

static void test_merging(void) {
  fdp_copy_list list;
  int64_t shape[] = {2, 3, 4, 5};
  /* Contiguous on both sides, or permuted alike, is one plain copy; reversed alike is too. */
  for (int layout = 0; layout < 2; ++layout) {
    rig_array a = rig_array_open(int32, 4, shape, layout ? RIG_COLUMNS : RIG_ROWS, host);
    rig_array b = rig_array_open(int32, 4, shape, layout ? RIG_COLUMNS : RIG_ROWS, host);
    fdp_copy_list_init(&list);
    CHECK_OK(fdp_plan_copy(&list, &a.view, &b.view));
    CHECK_EQUAL(list.count, 1);
    CHECK_EQUAL(list.copies[0].ndim, 0);
    CHECK_EQUAL(list.copies[0].item_bytes, 2 * 3 * 4 * 5 * 4);
    CHECK(list.copies[0].target == a.view.data && list.copies[0].source == b.view.data);
    fdp_copy_list_drop(&list);
    rig_array_close(&a);
    rig_array_close(&b);
  }
  rig_array rows = rig_array_open(int32, 4, shape, RIG_ROWS, host);
  rig_array backwards = rig_array_open(int32, 4, shape, RIG_NEGATIVE, host);
  fdp_copy_list_init(&list);
  CHECK_OK(fdp_plan_copy(&list, &backwards.view, &backwards.view));
  CHECK_EQUAL(list.copies[0].ndim, 0);
  fdp_copy_list_drop(&list);
  /* A slice of the middle dimension: what is inside it merges, what is outside stays. */
  fdp_view slice = fdp_view_narrow(&rows.view, 1, 1, 2);
  rig_array part = rig_array_open(int32, 4, slice.shape, RIG_ROWS, host);
  CHECK_OK(fdp_plan_copy(&list, &part.view, &slice));
  CHECK_EQUAL(list.count, 1);
  CHECK_EQUAL(list.copies[0].ndim, 1);
  CHECK_EQUAL(list.copies[0].shape[0], 2);
  CHECK_EQUAL(list.copies[0].item_bytes, 2 * 4 * 5 * 4);
  CHECK_EQUAL(list.copies[0].source_strides_bytes[0], 3 * 4 * 5 * 4);
  fdp_copy_list_drop(&list);
  rig_array_close(&part);
  rig_array_close(&rows);
  rig_array_close(&backwards);
}

/* Ten dimensions of two that cannot merge: each one that is too many doubles the copies. */
static void test_split(void) {
  int64_t shape[11];
  for (int32_t d = 0; d < 11; ++d) shape[d] = 2;
  rig_array target = rig_array_open(uint8, 10, shape, RIG_ROWS, host);
  rig_array source = rig_array_open(uint8, 10, shape, RIG_COLUMNS, host);
  fdp_copy_list list;
  const int32_t copies = 1 << (10 - FDP_COPY_MAX_DIMS);
  fdp_copy_list_init(&list);
  CHECK_OK(fdp_plan_copy(&list, &target.view, &source.view));
  CHECK_EQUAL(list.count, copies);
  CHECK_EQUAL(list.copies[copies - 1].ndim, FDP_COPY_MAX_DIMS);
  CHECK_OK(fdp_plan_copy(&list, &target.view, &source.view)); /* now on the heap */
  CHECK_EQUAL(list.count, 2 * copies);
  CHECK_EQUAL(list.size_bytes, 2 * 1024);
  char message[100];
  snprintf(message, sizeof message, "plan: no host memory for %d strided copies", 4 * copies);
  check_fail_allocation(1);
  CHECK_FAILS(fdp_plan_copy(&list, &target.view, &source.view), FDP_OUT_OF_MEMORY, message);
  CHECK(check_allocation_failed());
  fdp_copy_list_drop(&list);
  rig_array_close(&target);
  rig_array_close(&source);
  /* Nobody can hold such views; planning them must still not overflow. */
  fdp_view huge = {.data = shape, .device = host, .dtype = uint8, .ndim = 42};
  fdp_view turned = huge;
  for (int32_t d = 0; d < 42; ++d) {
    huge.shape[d] = turned.shape[d] = 2;
    huge.strides[d] = INT64_C(1) << (41 - d);
    turned.strides[d] = INT64_C(1) << d;
  }
  CHECK_FAILS(fdp_plan_copy(&list, &huge, &turned), FDP_UNSUPPORTED,
              "plan: a copy of 42 dimensions that do not merge needs more than 2147483647 strided "
              "copies");
  fdp_copy_list_drop(&list);
}

/* A source that passes its check may reach further than the product of a size and its stride. */
static void test_far_source(void) {
  fdp_copy_list list;
  int64_t memory[6];
  fdp_view target = {.data = memory, .device = host, .dtype = int32, .ndim = 2,
                     .shape = {3, 2}, .strides = {2, 1}};
  fdp_view source = target;
  source.data = (void *)(uintptr_t)4096;
  source.strides[0] = 0;
  source.strides[1] = INT64_C(1) << 60;
  CHECK_OK(fdp_view_check(&source, "source"));
  fdp_copy_list_init(&list);
  CHECK_OK(fdp_plan_copy(&list, &target, &source));
  CHECK_EQUAL(list.count, 1);
  CHECK_EQUAL(list.copies[0].ndim, 2);
  CHECK_EQUAL(list.copies[0].source_strides_bytes[1], INT64_C(1) << 62);
  fdp_copy_list_drop(&list);
}

void test_plan(void) {
  test_random_plans();
  test_merging();
  test_split();
  test_far_source();
}
