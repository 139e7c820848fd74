#include "py_scratch.h"

#include "context.h"
#include "py_state.h"

PyObject *fdp_py_scratch(PyObject *module, PyObject *trim) {
  fdp_scratch scratch[FDP_MAX_DEVICES];
  fdp_context *context = fdp_py_context(PyModule_GetState(module));
  int is_true = PyObject_IsTrue(trim);
  PyObject *result;
  int32_t count;

  if (context == NULL || is_true < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS
  count = fdp_context_scratch(context, is_true > 0, scratch);
  Py_END_ALLOW_THREADS
  result = PyTuple_New(count);
  for (int32_t i = 0; result != NULL && i < count; i++) {
    PyObject *row = Py_BuildValue("((ii)LL)", (int)scratch[i].id.kind, (int)scratch[i].id.ordinal,
                                  (long long)scratch[i].device_bytes,
                                  (long long)scratch[i].pinned_bytes);

    if (row == NULL)
      Py_CLEAR(result);
    else
      PyTuple_SET_ITEM(result, i, row);
  }
  return result;
}
