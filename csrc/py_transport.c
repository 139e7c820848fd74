#include "py_transport.h"

#include "py_error.h"
#include "py_state.h"

/* Two devices at least: a home and another. */
static int read_devices(PyObject *tuple, fdp_device_id *devices, int32_t *count) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) < 2 ||
      PyTuple_GET_SIZE(tuple) > FDP_MAX_REPLICAS + 1) {
    PyErr_Format(PyExc_TypeError, "devices: expected a tuple of 2 to %d devices, got %R",
                 FDP_MAX_REPLICAS + 1, tuple);
    return -1;
  }
  *count = (int32_t)PyTuple_GET_SIZE(tuple);
  for (int32_t i = 0; i < *count; i++) {
    PyObject *device = PyTuple_GET_ITEM(tuple, i);
    int kind;
    int ordinal;

    if (!PyTuple_Check(device)) {
      PyErr_Format(PyExc_TypeError, "devices[%d]: expected a tuple of two integers, got %R", (int)i,
                   device);
      return -1;
    }
    if (!PyArg_ParseTuple(device, "ii;devices: two integers each", &kind, &ordinal)) return -1;
    devices[i] = (fdp_device_id){kind, ordinal};
  }
  return 0;
}

static int read_wanted(PyObject *object, const char **wanted) {
  *wanted = NULL;
  if (object == Py_None) return 0;
  if (!PyUnicode_Check(object)) {
    PyErr_Format(PyExc_TypeError, "wanted: expected None or a str, got %.200s",
                 Py_TYPE(object)->tp_name);
    return -1;
  }
  *wanted = PyUnicode_AsUTF8(object);
  return *wanted == NULL ? -1 : 0;
}

PyObject *fdp_py_transport(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  fdp_py_state *state = PyModule_GetState(module);
  fdp_device_id devices[FDP_MAX_REPLICAS + 1];
  char reason[FDP_MESSAGE_BYTES] = "";
  const char *wanted = NULL;
  const char *name = NULL;
  fdp_context *context;
  int32_t device_count;
  fdp_status status = FDP_OK;

  if (fdp_py_expect_count("transport", count, 2) < 0) return NULL;
  if (read_devices(arguments[0], devices, &device_count) < 0) return NULL;
  if (read_wanted(arguments[1], &wanted) < 0) return NULL;
  if ((context = fdp_py_context(state)) == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  if (wanted != NULL) status = fdp_context_transport_name(wanted, &wanted);
  if (status == FDP_OK)
    status = fdp_context_transport(context, wanted, devices[0], devices + 1, device_count - 1,
                                   &name, reason, sizeof reason);
  Py_END_ALLOW_THREADS
  if (status != FDP_OK) return fdp_py_raise(state, status);
  return Py_BuildValue("(sN)", name,
                       PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace"));
}
