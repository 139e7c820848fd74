#include "py_log.h"

#include "log.h"
#include "py_error.h"

#include <string.h>

/* The numbers of Python's logging. */
static int logging_level(fdp_log_level level) {
  switch (level) {
    case FDP_LOG_OFF: break;
    case FDP_LOG_ERROR: return 40;
    case FDP_LOG_WARNING: return 30;
    case FDP_LOG_INFO: return 20;
    case FDP_LOG_DEBUG: return 10;
  }
  return 0;
}

/* May be called on any thread, with or without the GIL. Whoever holds the GIL never waits for a
 * lock that the core logs under: all calls that can block are made without it. */
static void log_sink(void *unused, fdp_log_level level, const char *message) {
  PyGILState_STATE gil;
  PyObject *former_error;
  PyObject *logging = NULL;
  PyObject *logger = NULL;
  PyObject *text = NULL;
  PyObject *done = NULL;

  (void)unused;
  if (!Py_IsInitialized()) return;
  gil = PyGILState_Ensure();
  former_error = fdp_py_error_take();
  logging = PyImport_ImportModule("logging");
  if (logging != NULL) logger = PyObject_CallMethod(logging, "getLogger", "s", "fastdp");
  if (logger != NULL)
    text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
  if (text != NULL)
    done = PyObject_CallMethod(logger, "log", "isO", logging_level(level), "%s", text);
  if (done == NULL && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_Clear();
    PyErr_SetInterrupt(); /* Ctrl-C while a handler ran: raised at the next chance instead */
  } else if (done == NULL) {
    PyErr_WriteUnraisable(logger); /* a broken handler must not break a step */
  }
  Py_XDECREF(done);
  Py_XDECREF(text);
  Py_XDECREF(logger);
  Py_XDECREF(logging);
  if (former_error != NULL) fdp_py_error_put(former_error);
  PyGILState_Release(gil);
}

int fdp_py_log_open(fdp_py_state *state) {
  fdp_log_level level = FDP_LOG_OFF;
  fdp_status status = fdp_log_level_from_env(&level);

  if (status != FDP_OK) {
    fdp_py_raise(state, status);
    return -1;
  }
  fdp_log_open(log_sink, NULL, level);
  return 0;
}
