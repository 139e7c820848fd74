#include "py_stream.h"

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
