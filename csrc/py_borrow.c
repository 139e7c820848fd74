#include "py_borrow.h"

#include "py_producer.h"
#include "py_stream.h"
#include "py_torch.h"

void fdp_py_borrower_open(fdp_py_borrower *borrower, fdp_py_state *state) {
  borrower->state = state;
  borrower->loans = NULL;
  borrower->loan_count = 0;
  borrower->loan_capacity = 0;
  borrower->stream_count = 0;
}

void fdp_py_borrower_close(fdp_py_borrower *borrower) {
  if (borrower->loan_count > 0) {
    PyObject *error = fdp_py_error_take(); /* a deleter may run Python code */

    for (int32_t i = 0; i < borrower->loan_count; i++)
      fdp_py_loan_give_back(&borrower->loans[i]);
    if (error != NULL) fdp_py_error_put(error);
  }
  PyMem_Free(borrower->loans);
  borrower->loans = NULL;
  borrower->loan_count = 0;
  borrower->loan_capacity = 0;
}

/* A free place in the list of loans, counted already; NULL with MemoryError. */
static fdp_py_loan *add_loan(fdp_py_borrower *borrower) {
  fdp_py_loan *loan;

  if (borrower->loan_count == borrower->loan_capacity) {
    int32_t capacity = borrower->loan_capacity == 0 ? 8 : 2 * borrower->loan_capacity;
    fdp_py_loan *loans = PyMem_Realloc(borrower->loans, (size_t)capacity * sizeof *loans);

    if (loans == NULL) {
      PyErr_NoMemory();
      return NULL;
    }
    borrower->loans = loans;
    borrower->loan_capacity = capacity;
  }
  loan = &borrower->loans[borrower->loan_count++];
  *loan = (fdp_py_loan){0};
  return loan;
}

static int fill_view(const DLTensor *tensor, const fdp_py_argument *argument, fdp_view *view) {
  if (tensor->ndim < 0 || tensor->ndim > FDP_MAX_DIMS)
    return fdp_py_refuse(PyExc_ValueError, argument, "%d dimensions, must be 0 to %d",
                         (int)tensor->ndim, FDP_MAX_DIMS);
  if (tensor->ndim > 0 && tensor->shape == NULL)
    return fdp_py_refuse(PyExc_ValueError, argument, "%d dimensions, but no shape",
                         (int)tensor->ndim);
  /* As a number: an offset that makes no sense may wrap, and fdp_view_check looks at the result. */
  view->data = NULL;
  if (tensor->data != NULL)
    view->data = (void *)((uintptr_t)tensor->data + (uintptr_t)tensor->byte_offset);
  view->device = (fdp_device_id){tensor->device.device_type, tensor->device.device_id};
  view->dtype = (fdp_dtype){tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes};
  view->ndim = tensor->ndim;
  if (tensor->strides != NULL) {
    for (int32_t i = 0; i < tensor->ndim; i++) {
      view->shape[i] = tensor->shape[i];
      view->strides[i] = tensor->strides[i];
    }
  } else {
    uint64_t stride = 1; /* may wrap: fdp_view_check refuses such shapes afterwards */

    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
      view->shape[i] = tensor->shape[i];
      view->strides[i] = (int64_t)stride;
      stride *= (uint64_t)tensor->shape[i];
    }
  }
  return 0;
}

/* A table that gave no view: the kind of the tensor if it is a known one, else the producer's
 * words. Replaces the error that is set. */
static int refuse_failed(const fdp_py_producer *producer, PyObject *object,
                         const fdp_py_argument *argument) {
  if (producer->is_torch) {
    PyObject *cause = fdp_py_error_take();

    if (cause != NULL && fdp_py_torch_check_kind(object, argument) < 0) {
      Py_DECREF(cause);
      return -1;
    }
    if (cause != NULL) fdp_py_error_put(cause);
  }
  return fdp_py_refuse_cause(argument);
}

static int borrow_table(fdp_py_borrower *borrower, const fdp_py_producer *producer,
                        PyObject *object, int intent, const fdp_py_argument *argument,
                        fdp_view *view) {
  const DLPackExchangeAPI *table = producer->table;
  DLTensor tensor;

  if (table->dltensor_from_py_object_no_sync != NULL) {
    if (table->dltensor_from_py_object_no_sync(object, &tensor) != 0)
      return refuse_failed(producer, object, argument);
  } else {
    fdp_py_loan *loan = add_loan(borrower);

    if (loan == NULL) return -1;
    if (table->managed_tensor_from_py_object_no_sync(object, &loan->versioned) != 0) {
      borrower->loan_count--;
      return refuse_failed(producer, object, argument);
    }
    tensor = loan->versioned->dl_tensor;
    if ((intent & FDP_PY_WRITE) && (loan->versioned->flags & DLPACK_FLAG_BITMASK_READ_ONLY))
      return fdp_py_refuse(PyExc_ValueError, argument, "read-only, cannot be written");
  }
  if (fill_view(&tensor, argument, view) < 0) return -1;
  if (!producer->is_torch) return 0;
  if ((intent & FDP_PY_CHECK_BITS) == 0 && view->dtype.code != FDP_CODE_COMPLEX) return 0;
  return fdp_py_torch_check_bits(&borrower->state->names, object,
                                 view->dtype.code == FDP_CODE_COMPLEX, argument);
}

/* __dlpack__ of an object that is no torch tensor, or of a detached torch tensor. */
static int borrow_capsule(fdp_py_borrower *borrower, PyObject *object, int intent,
                          const fdp_py_argument *argument, fdp_view *view) {
  DLDevice device;
  fdp_stream *stream = NULL;
  fdp_py_loan *loan;
  const DLTensor *tensor;

  if (fdp_py_capsule_device(borrower->state, object, argument, &device) < 0) return -1;
  if (fdp_py_borrow_stream(borrower, (fdp_device_id){device.device_type, device.device_id},
                           &stream) < 0)
    return -1;
  loan = add_loan(borrower);
  if (loan == NULL) return -1;
  if (fdp_py_capsule_take(borrower->state, object, argument, device, stream, loan) < 0) return -1;
  tensor = loan->versioned != NULL ? &loan->versioned->dl_tensor : &loan->legacy->dl_tensor;
  /* The legacy form cannot say "read-only"; producers refuse to make it for such data. */
  if ((intent & FDP_PY_WRITE) && loan->versioned != NULL &&
      (loan->versioned->flags & DLPACK_FLAG_BITMASK_READ_ONLY))
    return fdp_py_refuse(PyExc_ValueError, argument, "read-only, cannot be written");
  return fill_view(tensor, argument, view);
}

/* torch without the table. Its __dlpack__ refuses requires_grad and misses the negative bit. */
static int borrow_torch_capsule(fdp_py_borrower *borrower, PyObject *object, int intent,
                                const fdp_py_argument *argument, fdp_view *view) {
  const fdp_py_names *names = &borrower->state->names;
  PyObject *detached = NULL;
  int result;

  if (fdp_py_torch_check_kind(object, argument) < 0) return -1;
  if (fdp_py_torch_check_bits(names, object, true, argument) < 0) return -1;
  detached = PyObject_CallMethodNoArgs(object, names->detach);
  if (detached == NULL) return fdp_py_refuse_cause(argument);
  result = borrow_capsule(borrower, detached, intent, argument, view);
  Py_DECREF(detached); /* the tensor inside the capsule holds the memory */
  return result;
}

static int borrow_numpy(fdp_py_borrower *borrower, PyObject *object, int intent,
                        const fdp_py_argument *argument, fdp_view *view) {
  fdp_py_state *state = borrower->state;
  PyObject *refusal = NULL;
  bool read_only = false;
  int result;

  if (state->numpy_borrow == NULL) {
    PyObject *module = PyImport_ImportModule(FDP_PY_NUMPY_MODULE);
    PyObject *capsule = NULL;

    if (module != NULL) capsule = PyObject_GetAttrString(module, FDP_PY_NUMPY_ATTRIBUTE);
    if (capsule != NULL)
      state->numpy_borrow =
          (fdp_py_numpy_borrow)PyCapsule_GetPointer(capsule, FDP_PY_NUMPY_CAPSULE);
    Py_XDECREF(capsule);
    Py_XDECREF(module); /* stays loaded: extension modules are never unloaded */
    if (state->numpy_borrow == NULL) return -1;
  }
  result = state->numpy_borrow(object, view, &read_only, &refusal);
  if (result > 0) {
    fdp_py_refuse(PyExc_TypeError, argument, "%U", refusal);
    Py_DECREF(refusal);
    return -1;
  }
  if (result == 0 && read_only && (intent & FDP_PY_WRITE))
    return fdp_py_refuse(PyExc_ValueError, argument, "read-only, cannot be written");
  return result;
}

/* What every view must pass, however it came. (Overlap is the core's to check: the verbs know which
 * views may share memory.) */
static int check_view(fdp_py_state *state, const fdp_view *view,
                      const fdp_py_argument *argument) {
  char name[96];
  fdp_status status;

  if (view->device.kind < FDP_DEVICE_HOST || view->device.kind > FDP_DEVICE_CUDA_PINNED)
    return fdp_py_refuse(PyExc_ValueError, argument,
                         "on a device of DLPack kind %d, must be 1 (host), 2 (CUDA) or 3 (pinned "
                         "host)",
                         (int)view->device.kind);
  status = fdp_view_check(view, argument->name);
  if (status != FDP_OK) {
    /* Again, now with the whole name: writing it every time would cost more than the check. */
    fdp_view_check(view, fdp_py_argument_text(argument, name, sizeof name));
    fdp_py_raise(state, status);
    return -1;
  }
  return 0;
}

int fdp_py_borrow(fdp_py_borrower *borrower, PyObject *object, int intent,
                  const fdp_py_argument *argument, fdp_view *view) {
  fdp_py_producer producer;
  int result = -1;

  if (fdp_py_producer_find(borrower->state, Py_TYPE(object), &producer) < 0) return -1;
  switch (producer.way) {
    case FDP_PY_WAY_TABLE:
      result = borrow_table(borrower, &producer, object, intent, argument, view);
      break;
    case FDP_PY_WAY_CAPSULE:
      result = producer.is_torch ? borrow_torch_capsule(borrower, object, intent, argument, view)
                                 : borrow_capsule(borrower, object, intent, argument, view);
      break;
    case FDP_PY_WAY_NUMPY:
      result = borrow_numpy(borrower, object, intent, argument, view);
      break;
    case FDP_PY_WAY_REFUSED:
      return fdp_py_refuse(PyExc_TypeError, argument, "%s, got %.200s", producer.refusal,
                           Py_TYPE(object)->tp_name);
  }
  if (result < 0) return -1;
  return check_view(borrower->state, view, argument);
}

int fdp_py_borrow_tuple(fdp_py_borrower *borrower, PyObject *tuple, int intent, const char *name,
                        bool with_streams, fdp_py_views *views) {
  Py_ssize_t count;

  if (!PyTuple_Check(tuple)) {
    PyErr_Format(PyExc_TypeError, "%s: expected a tuple, got %.200s", name,
                 Py_TYPE(tuple)->tp_name);
    return -1;
  }
  count = PyTuple_GET_SIZE(tuple);
  if (count > FDP_PY_MAX_TENSORS) {
    PyErr_Format(PyExc_ValueError, "%s: %zd tensors, must be at most %d", name, count,
                 FDP_PY_MAX_TENSORS);
    return -1;
  }
  views->items = PyMem_Malloc((size_t)count * sizeof *views->items);
  if (with_streams) views->streams = PyMem_Malloc((size_t)count * sizeof *views->streams);
  if (views->items == NULL || (with_streams && views->streams == NULL)) {
    PyErr_NoMemory();
    return -1;
  }
  views->count = (int32_t)count;
  for (int32_t i = 0; i < views->count; i++) {
    fdp_py_argument argument = {name, i, -1};
    fdp_view *view = &views->items[i];

    if (fdp_py_borrow(borrower, PyTuple_GET_ITEM(tuple, i), intent, &argument, view) < 0)
      return -1;
    if (with_streams && fdp_py_borrow_stream(borrower, view->device, &views->streams[i]) < 0)
      return -1;
  }
  return 0;
}

void fdp_py_views_drop(fdp_py_views *views) {
  PyMem_Free(views->items);
  PyMem_Free(views->streams);
  *views = (fdp_py_views){0};
}

int fdp_py_borrow_stream(fdp_py_borrower *borrower, fdp_device_id device, fdp_stream **stream) {
  fdp_py_device_stream *entry;

  *stream = NULL;
  if (device.kind != FDP_DEVICE_CUDA) return 0;
  for (int32_t i = 0; i < borrower->stream_count; i++) {
    if (fdp_device_equal(borrower->streams[i].device, device)) {
      *stream = borrower->streams[i].stream;
      return 0;
    }
  }
  if (fdp_py_stream_current(borrower->state, device, stream) < 0) return -1;
  if (borrower->stream_count == FDP_MAX_REPLICAS) return 0; /* more devices: asked again */
  entry = &borrower->streams[borrower->stream_count++];
  *entry = (fdp_py_device_stream){device, *stream};
  return 0;
}
