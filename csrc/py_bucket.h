/* The type Bucket: a plan (bucket.h) made for a tuple of tensors. It keeps no tensor. Immutable, but
 * for what it remembers of its buffers, so any thread may use it. */
#ifndef FDP_PY_BUCKET_H
#define FDP_PY_BUCKET_H

#include "bucket.h"
#include "py_slots.h"
#include "py_state.h"

typedef struct fdp_py_bucket {
  PyObject_HEAD
  fdp_bucket *plan;
  int64_t size_elems;
  fdp_py_cuts *cuts; /* NULL until the first split */
} fdp_py_bucket;

/* Adds the type to the module. 0, or -1 with an error set. */
int fdp_py_bucket_add(PyObject *module);

#endif
