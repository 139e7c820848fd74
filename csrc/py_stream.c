#include "py_stream.h"

#include "context.h"
#include "py_error.h"

/* torch.cuda.current_stream(ordinal).cuda_stream, for a torch without the exchange table. Leaves
 * NULL when torch is not there. */
static int ask_torch(int32_t ordinal, fdp_stream **stream) {
  PyObject *modules = PyImport_GetModuleDict();
  PyObject *name = PyUnicode_FromString("torch.cuda");
  PyObject *module = NULL;
  PyObject *current = NULL;
  PyObject *handle = NULL;
  int result = -1;

  if (name == NULL) goto done;
  if (!PyDict_Contains(modules, name)) {
    result = 0;
    goto done;
  }
  module = PyImport_GetModule(name);
  if (module == NULL) goto done;
  current = PyObject_CallMethod(module, "current_stream", "i", (int)ordinal);
  if (current == NULL) goto done;
  handle = PyObject_GetAttrString(current, "cuda_stream");
  if (handle == NULL) goto done;
  *stream = PyLong_AsVoidPtr(handle);
  if (*stream == NULL && PyErr_Occurred()) goto done;
  result = 0;
done:
  Py_XDECREF(handle);
  Py_XDECREF(current);
  Py_XDECREF(module);
  Py_XDECREF(name);
  return result;
}

int fdp_py_stream_current(fdp_py_state *state, fdp_device_id device, fdp_stream **stream) {
  void *handle = NULL;

  *stream = NULL;
  if (device.kind != FDP_DEVICE_CUDA) return 0;
  if (state->stream_table == NULL) return ask_torch(device.ordinal, stream);
  if (state->stream_table->current_work_stream(device.kind, device.ordinal, &handle) != 0)
    return -1;
  *stream = handle;
  return 0;
}

PyObject *fdp_py_open_stream(PyObject *module, PyObject *device) {
  fdp_py_state *state = PyModule_GetState(module);
  fdp_context *context;
  fdp_device *opened = NULL;
  fdp_stream *stream = NULL;
  fdp_status status;
  int kind;
  int ordinal;

  if (!PyTuple_Check(device)) {
    PyErr_Format(PyExc_TypeError, "device: expected a tuple of two integers, got %R", device);
    return NULL;
  }
  if (!PyArg_ParseTuple(device, "ii;device: two integers", &kind, &ordinal)) return NULL;
  if (kind != FDP_DEVICE_CUDA) {
    PyErr_Format(PyExc_ValueError, "device: %R is no GPU (%d, index)", device, FDP_DEVICE_CUDA);
    return NULL;
  }
  if ((context = fdp_py_context(state)) == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = fdp_context_device(context, (fdp_device_id){kind, ordinal}, &opened);
  if (status == FDP_OK) status = opened->ops->stream_open(opened, &stream);
  Py_END_ALLOW_THREADS
  if (status != FDP_OK) return fdp_py_raise(state, status);
  return PyLong_FromVoidPtr(stream);
}
