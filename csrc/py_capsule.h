/* The capsule protocol, for objects whose type carries no exchange table: __dlpack__, versioned and
 * legacy. The tensor inside a capsule is owned by us from the moment it is taken, and given back by
 * its deleter. Needs the GIL. Data are ready on the stream that is passed to __dlpack__. */
#ifndef FDP_PY_CAPSULE_H
#define FDP_PY_CAPSULE_H

#include "py_error.h"
#include "py_state.h"

/* A managed tensor that has to be given back: exactly one pointer is set, or none. */
typedef struct fdp_py_loan {
  DLManagedTensorVersioned *versioned;
  DLManagedTensor *legacy;
} fdp_py_loan;

/* Calls the deleter. No lock may be held: a deleter may want the GIL. */
void fdp_py_loan_give_back(fdp_py_loan *loan);

/* (kind, ordinal) of object.__dlpack_device__(). 0, or -1 with an error set. */
int fdp_py_capsule_device(fdp_py_state *state, PyObject *object, const fdp_py_argument *argument,
                          DLDevice *device);

/* Takes the tensor out of object.__dlpack__(), ready on `stream`. 0, or -1 with an error set. */
int fdp_py_capsule_take(fdp_py_state *state, PyObject *object, const fdp_py_argument *argument,
                        DLDevice device, fdp_stream *stream, fdp_py_loan *loan);

#endif
