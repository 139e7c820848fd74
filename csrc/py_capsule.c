#include "py_capsule.h"

#include "py_producer.h"

void fdp_py_loan_give_back(fdp_py_loan *loan) {
  fdp_py_loan taken = *loan;

  *loan = (fdp_py_loan){0};
  if (taken.versioned != NULL && taken.versioned->deleter != NULL)
    taken.versioned->deleter(taken.versioned);
  if (taken.legacy != NULL && taken.legacy->deleter != NULL) taken.legacy->deleter(taken.legacy);
}

/* One number of the pair that __dlpack_device__ gives. */
static bool device_number(PyObject *pair, Py_ssize_t index, int32_t *number) {
  long value = PyLong_AsLong(PyTuple_GET_ITEM(pair, index));

  if (value == -1 && PyErr_Occurred()) PyErr_Clear();
  *number = (int32_t)value;
  return value >= 0 && value <= INT32_MAX;
}

int fdp_py_capsule_device(fdp_py_state *state, PyObject *object, const fdp_py_argument *argument,
                          DLDevice *device) {
  PyObject *pair = PyObject_CallMethodNoArgs(object, state->names.dlpack_device);
  int result = -1;

  if (pair == NULL) return fdp_py_refuse_cause(argument);
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
    fdp_py_refuse(PyExc_TypeError, argument, "__dlpack_device__() gave %R, not (kind, ordinal)",
                  pair);
    goto done;
  }
  if (device_number(pair, 0, &device->device_type) && device_number(pair, 1, &device->device_id))
    result = 0;
  else
    fdp_py_refuse(PyExc_ValueError, argument,
                  "__dlpack_device__() gave %R, must be two numbers from 0 to %d", pair, INT32_MAX);
done:
  Py_XDECREF(pair);
  return result;
}

/* object.__dlpack__(max_version=..., stream=...). The host has no streams, and NumPy and torch
 * refuse one there, so it is passed on CUDA only. */
static PyObject *call_dlpack(fdp_py_state *state, PyObject *object, PyObject *stream,
                             bool versioned) {
  PyObject *arguments[3] = {object, NULL, NULL};
  PyObject *keywords = NULL;
  Py_ssize_t count = 1;

  if (versioned) arguments[count++] = state->max_version;
  if (stream != NULL) arguments[count++] = stream;
  if (versioned)
    keywords = stream != NULL ? state->keywords_version_stream : state->keywords_version;
  else if (stream != NULL)
    keywords = state->keywords_stream;
  return PyObject_VectorcallMethod(state->names.dlpack, arguments, 1, keywords);
}

/* A stream handle as the protocol writes it: the legacy default stream is 1. New reference. */
static PyObject *stream_number(fdp_stream *stream) {
  return stream == NULL ? PyLong_FromLong(1) : PyLong_FromVoidPtr(stream);
}

/* Takes the tensor over: renames the capsule, so that its own destructor leaves it alone. */
static int consume(PyObject *capsule, const fdp_py_argument *argument, fdp_py_loan *loan) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    loan->versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) goto failed;
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    loan->legacy = PyCapsule_GetPointer(capsule, "dltensor");
    if (PyCapsule_SetName(capsule, "used_dltensor") < 0) goto failed;
  } else {
    return fdp_py_refuse(PyExc_TypeError, argument,
                         "__dlpack__() gave %R, not an unused DLPack capsule", capsule);
  }
  if (PyCapsule_SetDestructor(capsule, NULL) < 0) goto failed;
  if (loan->versioned != NULL && loan->versioned->version.major != DLPACK_MAJOR_VERSION) {
    unsigned major = loan->versioned->version.major;

    fdp_py_loan_give_back(loan); /* all that may be done with an unknown major */
    return fdp_py_refuse(PyExc_BufferError, argument, "DLPack version %u, must be %d", major,
                         DLPACK_MAJOR_VERSION);
  }
  return 0;
failed:
  *loan = (fdp_py_loan){0}; /* still the capsule's */
  return -1;
}

/* torch's __dlpack__ refuses a tensor whose device is not the current one: torch.cuda.device(...),
 * entered; NULL with an error set. */
static PyObject *enter_torch_device(DLDevice device) {
  PyObject *module = PyImport_ImportModule("torch.cuda");
  PyObject *guard = NULL;
  PyObject *entered = NULL;

  if (module == NULL) return NULL;
  guard = PyObject_CallMethod(module, "device", "i", (int)device.device_id);
  if (guard != NULL) entered = PyObject_CallMethod(guard, "__enter__", NULL);
  if (entered == NULL) Py_CLEAR(guard);
  Py_XDECREF(entered);
  Py_DECREF(module);
  return guard;
}

/* Leaves it again, keeping an error that is already set. */
static int leave_torch_device(PyObject *guard) {
  PyObject *error = fdp_py_error_take();
  PyObject *left = PyObject_CallMethod(guard, "__exit__", "OOO", Py_None, Py_None, Py_None);
  int result = left != NULL ? 0 : -1;

  Py_XDECREF(left);
  Py_DECREF(guard);
  if (error == NULL) return result;
  if (result < 0) PyErr_Clear();
  fdp_py_error_put(error);
  return -1;
}

int fdp_py_capsule_take(fdp_py_state *state, PyObject *object, const fdp_py_argument *argument,
                        DLDevice device, fdp_stream *stream, fdp_py_loan *loan) {
  fdp_py_producer producer;
  PyObject *guard = NULL;
  PyObject *number = NULL;
  PyObject *capsule = NULL;
  int result = -1;

  *loan = (fdp_py_loan){0};
  if (fdp_py_producer_find(state, Py_TYPE(object), &producer) < 0) goto done;
  if (device.device_type == FDP_DEVICE_CUDA) {
    number = stream_number(stream);
    if (number == NULL) goto done;
    if (producer.is_torch && (guard = enter_torch_device(device)) == NULL) goto done;
  }
  capsule = call_dlpack(state, object, number, true);
  if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear(); /* a producer from before DLPack 1.0 does not know max_version */
    capsule = call_dlpack(state, object, number, false);
  }
  if (capsule == NULL) {
    fdp_py_refuse_cause(argument);
    goto done;
  }
  result = consume(capsule, argument, loan);
done:
  if (guard != NULL && leave_torch_device(guard) < 0) {
    fdp_py_loan_give_back(loan);
    result = -1;
  }
  Py_XDECREF(number);
  Py_XDECREF(capsule);
  return result;
}
