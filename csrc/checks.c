#include "checks.h"

#include <inttypes.h>
#include <stdio.h>

/* Room for a shape in a message; what is longer is cut. */
#define SHAPE_TEXT_BYTES 200

fdp_status fdp_check_count(const char *verb, const char *name, int32_t count) {
  if (count >= 1 && count <= FDP_MAX_REPLICAS) return FDP_OK;
  return fdp_fail(FDP_INVALID_ARGUMENT, "%s: number of %s is %d, must be 1 to %d", verb, name,
                  count, FDP_MAX_REPLICAS);
}

fdp_status fdp_check_dtypes(const char *verb, fdp_named_views views, const char *model_name,
                            const fdp_view *model) {
  for (int32_t i = 0; i < views.count; ++i) {
    if (fdp_dtype_equal(views.views[i].dtype, model->dtype)) continue;
    char text[48], model_text[48];
    return fdp_fail(FDP_INVALID_TYPE, "%s: %s[%d] is %s, must be %s as %s", verb, views.name, i,
                    fdp_dtype_name(views.views[i].dtype, text, sizeof text),
                    fdp_dtype_name(model->dtype, model_text, sizeof model_text), model_name);
  }
  return FDP_OK;
}

fdp_status fdp_check_shapes(const char *verb, fdp_named_views views, const char *model_name,
                            const fdp_view *model) {
  for (int32_t i = 0; i < views.count; ++i) {
    if (fdp_view_same_shape(&views.views[i], model)) continue;
    char text[SHAPE_TEXT_BYTES], model_text[SHAPE_TEXT_BYTES];
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s[%d] has shape %s, must be %s as %s", verb,
                    views.name, i, fdp_view_shape_text(&views.views[i], text, sizeof text),
                    fdp_view_shape_text(model, model_text, sizeof model_text), model_name);
  }
  return FDP_OK;
}

static bool is_slice_shape(const fdp_view *part, const fdp_view *whole, int32_t dim) {
  if (part->ndim != whole->ndim) return false;
  for (int32_t d = 0; d < whole->ndim; ++d) {
    if (d != dim && part->shape[d] != whole->shape[d]) return false;
  }
  return true;
}

fdp_status fdp_check_slices(const char *verb, fdp_named_views parts, const char *whole_name,
                            const fdp_view *whole, int32_t dim) {
  char text[SHAPE_TEXT_BYTES], whole_text[SHAPE_TEXT_BYTES];
  if (whole->ndim == 0) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s has shape (), must have at least one dimension",
                    verb, whole_name);
  }
  if (dim < 0 || dim >= whole->ndim) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: dim is %d, must be 0 to %d, since %s has shape %s",
                    verb, dim, whole->ndim - 1, whole_name,
                    fdp_view_shape_text(whole, whole_text, sizeof whole_text));
  }
  int64_t total = 0;
  for (int32_t i = 0; i < parts.count; ++i) {
    const fdp_view *part = &parts.views[i];
    if (!is_slice_shape(part, whole, dim)) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s[%d] has shape %s, but for dimension %d it must "
                      "be %s as %s", verb, parts.name, i,
                      fdp_view_shape_text(part, text, sizeof text), dim,
                      fdp_view_shape_text(whole, whole_text, sizeof whole_text), whole_name);
    }
    if (part->shape[dim] > whole->shape[dim] - total) {
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s[%d] has shape %s, but dimension %d must be at "
                      "most %" PRId64 ", what the ones before it left of %s %s", verb, parts.name,
                      i, fdp_view_shape_text(part, text, sizeof text), dim,
                      whole->shape[dim] - total, whole_name,
                      fdp_view_shape_text(whole, whole_text, sizeof whole_text));
    }
    total += part->shape[dim];
  }
  if (total != whole->shape[dim]) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: sizes of %s along dimension %d add up to %" PRId64
                    ", must be %" PRId64 " as %s", verb, parts.name, dim, total, whole->shape[dim],
                    whole_name);
  }
  return FDP_OK;
}

/* "targets[2]", or "target". */
static const char *argument_text(const fdp_named_views *views, int32_t index, char *text,
                                 size_t size_bytes) {
  if (views->is_single) return views->name;
  snprintf(text, size_bytes, "%s[%d]", views->name, index);
  return text;
}

fdp_status fdp_check_writable(const char *verb, fdp_named_views targets) {
  for (int32_t i = 0; i < targets.count; ++i) {
    if (fdp_view_overlaps_itself(&targets.views[i])) {
      char text[48];
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s overlaps itself, must not, since it is written",
                      verb, argument_text(&targets, i, text, sizeof text));
    }
    for (int32_t k = 0; k < i; ++k) {
      if (!fdp_views_overlap(&targets.views[i], &targets.views[k])) continue;
      return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s[%d] overlaps %s[%d], must not, since both are "
                      "written", verb, targets.name, i, targets.name, k);
    }
  }
  return FDP_OK;
}

bool fdp_is_same_view(const fdp_view *a, const fdp_view *b) {
  return a->data == b->data && fdp_device_equal(a->device, b->device) &&
         fdp_dtype_equal(a->dtype, b->dtype) && fdp_view_same_layout(a, b);
}

fdp_status fdp_check_apart(const char *verb, fdp_named_views views, const char *other_name,
                           const fdp_view *other, bool same_is_fine) {
  for (int32_t i = 0; i < views.count; ++i) {
    if (!fdp_views_overlap(&views.views[i], other)) continue;
    if (same_is_fine && fdp_is_same_view(&views.views[i], other)) continue;
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s: %s[%d] overlaps %s, must not%s", verb, views.name, i,
                    other_name, same_is_fine ? " unless it is the same view" : "");
  }
  return FDP_OK;
}
