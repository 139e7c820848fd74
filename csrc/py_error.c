#include "py_error.h"

#include "py_recorder.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *fdp_py_argument_text(const fdp_py_argument *argument, char *text, size_t size_bytes) {
  if (argument->index < 0)
    snprintf(text, size_bytes, "%s", argument->name);
  else if (argument->inner < 0)
    snprintf(text, size_bytes, "%s[%d]", argument->name, (int)argument->index);
  else
    snprintf(text, size_bytes, "%s[%d][%d]", argument->name, (int)argument->index,
             (int)argument->inner);
  return text;
}

/* One exception class, a strong reference in `slot` and a name in the module. */
static int add_exception(PyObject *module, PyObject **slot, const char *name, const char *doc,
                         PyObject *bases) {
  char qualified[64];

  snprintf(qualified, sizeof qualified, "fastdp._C.%s", name);
  *slot = PyErr_NewExceptionWithDoc(qualified, doc, bases, NULL);
  if (*slot == NULL) return -1;
  return PyModule_AddObjectRef(module, name, *slot);
}

int fdp_py_error_add(PyObject *module) {
  fdp_py_state *state = PyModule_GetState(module);
  PyObject *timeout_bases = NULL;
  int result = -1;

  if (add_exception(module, &state->error, "Error",
                    "Base of the core's own errors: what is neither the caller's mistake "
                    "(ValueError, TypeError), MemoryError nor NotImplementedError.",
                    PyExc_RuntimeError) < 0)
    goto done;
  /* Also the builtin, so that code which catches any timeout catches ours. */
  timeout_bases = PyTuple_Pack(2, state->error, PyExc_TimeoutError);
  if (timeout_bases == NULL) goto done;
  if (add_exception(module, &state->timeout_error, "TimeoutError",
                    "A wait on the host passed its deadline.", timeout_bases) < 0)
    goto done;
  if (add_exception(module, &state->device_error, "DeviceError",
                    "A device or its driver reported a failure.", state->error) < 0)
    goto done;
  if (add_exception(module, &state->aborted_error, "AbortedError",
                    "A wait on the host was told to stop.", state->error) < 0)
    goto done;
  if (add_exception(module, &state->fault_injected, "FaultInjected",
                    "A test asked for this failure (arm_fault).", state->error) < 0)
    goto done;
  result = 0;
done:
  Py_XDECREF(timeout_bases);
  return result;
}

PyObject *fdp_py_raise(fdp_py_state *state, fdp_status status) {
  PyObject *type = state->error;
  const char *message = fdp_last_message();
  PyObject *text;

  switch (status) {
    case FDP_OK: break; /* never raised; falls to the plain Error below */
    case FDP_INVALID_ARGUMENT: type = PyExc_ValueError; break;
    case FDP_INVALID_TYPE: type = PyExc_TypeError; break;
    case FDP_OUT_OF_MEMORY: type = PyExc_MemoryError; break;
    case FDP_TIMED_OUT: type = state->timeout_error; break;
    case FDP_ABORTED: type = state->aborted_error; break;
    case FDP_DEVICE_ERROR: type = state->device_error; break;
    case FDP_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    case FDP_FAULT_INJECTED: type = state->fault_injected; break;
  }
  if (message[0] == '\0') message = fdp_status_name(status);
  /* A long message may be cut inside a character. */
  text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
  if (text != NULL) text = fdp_py_recorder_add(text, status);
  if (text != NULL) PyErr_SetObject(type, text);
  Py_XDECREF(text);
  return NULL;
}

int fdp_py_refuse(PyObject *type, const fdp_py_argument *argument, const char *format, ...) {
  char name[96];
  va_list arguments;
  PyObject *message;

  va_start(arguments, format);
  message = PyUnicode_FromFormatV(format, arguments);
  va_end(arguments);
  if (message == NULL) return -1;
  PyErr_Format(type, "%s: %U", fdp_py_argument_text(argument, name, sizeof name), message);
  Py_DECREF(message);
  return -1;
}

int fdp_py_refuse_cause(const fdp_py_argument *argument) {
  PyObject *cause = fdp_py_error_take();

  if (cause == NULL)
    return fdp_py_refuse(PyExc_SystemError, argument, "the producer failed without an error");
  if (PyErr_GivenExceptionMatches(cause, PyExc_MemoryError) ||
      !PyErr_GivenExceptionMatches(cause, PyExc_Exception)) {
    fdp_py_error_put(cause);
    return -1;
  }
  fdp_py_refuse(PyErr_GivenExceptionMatches(cause, PyExc_BufferError) ? PyExc_BufferError
                                                                     : PyExc_TypeError,
                argument, "cannot be borrowed: %S", cause);
  Py_DECREF(cause);
  return -1;
}

int fdp_py_expect_count(const char *function, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return 0;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments, %zd given", function, wanted,
               given);
  return -1;
}
