/* The type Bucket: a plan (bucket.h) made for a tuple of tensors. It keeps no tensor. Immutable,
 * but for what it remembers of its buffers, so any thread may use it. */
#ifndef FDP_PY_BUCKET_H
#define FDP_PY_BUCKET_H

#include "bucket.h"
#include "py_borrow.h"
#include "py_slots.h"
#include "py_state.h"

typedef struct fdp_py_bucket {
  PyObject_HEAD
  fdp_bucket *plan;
  int64_t size_elems;
  fdp_py_cuts *cuts; /* NULL until the first split */
} fdp_py_bucket;

/* Borrows one of the bucket's flat buffers, to be written. 0, or -1 with an error set, in which the
 * core's own words name `verb`. */
int fdp_py_bucket_borrow_flat(const fdp_py_bucket *bucket, fdp_py_borrower *borrower,
                              PyObject *flat, const char *verb, fdp_view *view);

/* Adds the type to the module. 0, or -1 with an error set. */
int fdp_py_bucket_add(PyObject *module);

#endif
