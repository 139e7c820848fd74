#include "py_verbs.h"

#include "broadcast.h"
#include "gather.h"
#include "py_borrow.h"
#include "reduce.h"
#include "scatter.h"

/* One tensor on one side, a tuple of tensors on the other: the shape of all four verbs. */
typedef struct verb_call {
  fdp_py_borrower borrower;
  fdp_context *context;
  fdp_view one;
  fdp_stream *one_stream;
  fdp_py_views many;
} verb_call;

static int borrow_one(verb_call *call, PyObject *object, int intent, const char *name) {
  fdp_py_argument argument = {name, -1, -1};

  if (fdp_py_borrow(&call->borrower, object, intent, &argument, &call->one) < 0) return -1;
  return fdp_py_borrow_stream(&call->borrower, call->one.device, &call->one_stream);
}

/* Borrows a source and its targets. 0, or -1 with an error set; verb_done follows either way. */
static int verb_one_to_many(verb_call *call, PyObject *module, PyObject *source,
                            PyObject *targets) {
  fdp_py_borrower_open(&call->borrower, PyModule_GetState(module));
  call->many = (fdp_py_views){0};
  call->context = fdp_py_context(call->borrower.state);
  if (call->context == NULL) return -1;
  if (borrow_one(call, source, FDP_PY_READ | FDP_PY_CHECK_BITS, "source") < 0) return -1;
  return fdp_py_borrow_tuple(&call->borrower, targets, FDP_PY_WRITE | FDP_PY_CHECK_BITS, "targets",
                             true, &call->many);
}

/* Borrows sources and their target. */
static int verb_many_to_one(verb_call *call, PyObject *module, PyObject *sources,
                            PyObject *target) {
  fdp_py_borrower_open(&call->borrower, PyModule_GetState(module));
  call->many = (fdp_py_views){0};
  call->context = fdp_py_context(call->borrower.state);
  if (call->context == NULL) return -1;
  if (fdp_py_borrow_tuple(&call->borrower, sources, FDP_PY_READ | FDP_PY_CHECK_BITS, "sources",
                          true, &call->many) < 0)
    return -1;
  return borrow_one(call, target, FDP_PY_WRITE | FDP_PY_CHECK_BITS, "target");
}

/* Gives back what was borrowed, and the verb's answer: None, or NULL with its error raised. */
static PyObject *verb_done(verb_call *call, bool borrowed, fdp_status status) {
  PyObject *result = NULL;

  if (borrowed) result = status == FDP_OK ? Py_NewRef(Py_None)
                                          : fdp_py_raise(call->borrower.state, status);
  fdp_py_views_drop(&call->many);
  fdp_py_borrower_close(&call->borrower);
  return result;
}

static int read_dim(PyObject *object, int32_t *dim) {
  long value = PyLong_AsLong(object);

  if (value == -1 && PyErr_Occurred()) return -1;
  *dim = (int32_t)value;
  if (*dim == value) return 0;
  PyErr_Format(PyExc_ValueError, "dim: %ld is out of range", value);
  return -1;
}

/* A GPU's stream by its handle, as torch gives it. None stands for the current one, and on the host
 * there is no other. */
static int read_stream(PyObject *object, fdp_device_id device, fdp_stream **stream) {
  fdp_stream *read;

  if (object == Py_None) return 0;
  read = PyLong_AsVoidPtr(object);
  if (read == NULL && PyErr_Occurred()) return -1;
  if (device.kind == FDP_DEVICE_CUDA) *stream = read;
  return 0;
}

PyObject *fdp_py_scatter(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  verb_call call;
  fdp_status status = FDP_OK;
  bool borrowed;
  int32_t dim;

  if (count != 4 && fdp_py_expect_count("scatter", count, 3) < 0) return NULL;
  if (read_dim(arguments[2], &dim) < 0) return NULL;
  borrowed = verb_one_to_many(&call, module, arguments[0], arguments[1]) == 0;
  if (borrowed && count == 4) {
    borrowed = read_stream(arguments[3], call.one.device, &call.one_stream) == 0;
  }
  if (borrowed) {
    Py_BEGIN_ALLOW_THREADS
    status = fdp_scatter(call.context, &call.one, call.one_stream, call.many.items,
                         call.many.streams, call.many.count, dim);
    Py_END_ALLOW_THREADS
  }
  return verb_done(&call, borrowed, status);
}

PyObject *fdp_py_gather(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  verb_call call;
  fdp_status status = FDP_OK;
  bool borrowed;
  int32_t dim;

  if (fdp_py_expect_count("gather", count, 3) < 0) return NULL;
  if (read_dim(arguments[2], &dim) < 0) return NULL;
  borrowed = verb_many_to_one(&call, module, arguments[0], arguments[1]) == 0;
  if (borrowed) {
    Py_BEGIN_ALLOW_THREADS
    status = fdp_gather(call.context, call.many.items, call.many.streams, call.many.count,
                        &call.one, call.one_stream, dim);
    Py_END_ALLOW_THREADS
  }
  return verb_done(&call, borrowed, status);
}

PyObject *fdp_py_broadcast(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  verb_call call;
  fdp_status status = FDP_OK;
  bool borrowed;

  if (fdp_py_expect_count("broadcast", count, 2) < 0) return NULL;
  borrowed = verb_one_to_many(&call, module, arguments[0], arguments[1]) == 0;
  if (borrowed) {
    Py_BEGIN_ALLOW_THREADS
    status = fdp_broadcast(call.context, &call.one, call.one_stream, call.many.items,
                           call.many.streams, call.many.count);
    Py_END_ALLOW_THREADS
  }
  return verb_done(&call, borrowed, status);
}

PyObject *fdp_py_reduce(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  verb_call call;
  fdp_status status = FDP_OK;
  bool borrowed;

  if (fdp_py_expect_count("reduce", count, 2) < 0) return NULL;
  borrowed = verb_many_to_one(&call, module, arguments[0], arguments[1]) == 0;
  if (borrowed) {
    Py_BEGIN_ALLOW_THREADS
    status = fdp_reduce(call.context, call.many.items, call.many.streams, call.many.count,
                        &call.one, call.one_stream);
    Py_END_ALLOW_THREADS
  }
  return verb_done(&call, borrowed, status);
}
