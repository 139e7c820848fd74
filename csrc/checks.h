/* What verbs refuse, each with a message of the form "verb: argument[i] is value, must be bound".
 * Pure: any thread, no streams. The views have passed fdp_view_check. */
#ifndef FDP_CHECKS_H
#define FDP_CHECKS_H

#include "view.h"

/* An array of views under one name, e.g. "targets"; or one view that is no array. */
typedef struct fdp_named_views {
  const char *name;
  const fdp_view *views;
  int32_t count;
  bool is_single; /* "target", not "target[0]" */
} fdp_named_views;

/* From 1 to FDP_MAX_REPLICAS. */
fdp_status fdp_check_count(const char *verb, const char *name, int32_t count);
/* Each has the dtype of `model`. */
fdp_status fdp_check_dtypes(const char *verb, fdp_named_views views, const char *model_name,
                            const fdp_view *model);
/* Each has the shape of `model`. */
fdp_status fdp_check_shapes(const char *verb, fdp_named_views views, const char *model_name,
                            const fdp_view *model);
/* Each has the shape of `whole` but for `dim`, where the sizes add up to the whole's. */
fdp_status fdp_check_slices(const char *verb, fdp_named_views parts, const char *whole_name,
                            const fdp_view *whole, int32_t dim);
/* None overlaps itself, or another of them. */
fdp_status fdp_check_writable(const char *verb, fdp_named_views targets);
/* None overlaps `other`. Where `same_is_fine`, one that is `other` itself may. */
fdp_status fdp_check_apart(const char *verb, fdp_named_views views, const char *other_name,
                           const fdp_view *other, bool same_is_fine);
/* The same memory by the same layout. */
bool fdp_is_same_view(const fdp_view *a, const fdp_view *b);

#endif
