#include "py_recorder.h"

#include <string.h>

#include "env.h"
#include "log.h"
#include "py_error.h"
#include "recorder.h"

/* The choices of FASTDP_DUMP, as env.c has them. */
enum { DUMP_OFF, DUMP_ERROR, DUMP_SIGNAL, DUMP_BOTH };

int fdp_py_recorder_open(fdp_py_state *state) {
  int32_t choice = DUMP_OFF;
  fdp_status status = fdp_env_choice(FDP_ENV_DUMP, &choice);

  if (status != FDP_OK) {
    fdp_py_raise(state, status);
    return -1;
  }
  if (choice != DUMP_SIGNAL && choice != DUMP_BOTH) return 0;
  if (fdp_recorder_on_signal() != FDP_OK)
    fdp_log(FDP_LOG_WARNING, "FASTDP_DUMP has no effect: %s", fdp_last_message());
  return 0;
}

/* New reference, or NULL with an error set. */
static PyObject *text_of_ring(void) {
  char *text = PyMem_Malloc(FDP_RECORDER_TEXT_BYTES);
  PyObject *result;

  if (text == NULL) return PyErr_NoMemory();
  fdp_recorder_text(text, FDP_RECORDER_TEXT_BYTES);
  result = PyUnicode_FromString(text); /* all of it is ASCII */
  PyMem_Free(text);
  return result;
}

PyObject *fdp_py_recorder_add(PyObject *message, fdp_status status) {
  int32_t choice = DUMP_OFF;
  PyObject *ring;
  PyObject *both;

  if (status == FDP_INVALID_ARGUMENT || status == FDP_INVALID_TYPE || status == FDP_UNSUPPORTED)
    return message;
  if (fdp_env_choice(FDP_ENV_DUMP, &choice) != FDP_OK) return message;
  if (choice != DUMP_ERROR && choice != DUMP_BOTH) return message;
  ring = text_of_ring();
  both = ring == NULL ? NULL : PyUnicode_FromFormat("%U\n%U", message, ring);
  Py_XDECREF(ring);
  Py_DECREF(message);
  return both;
}

PyObject *fdp_py_recorder_dump(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return text_of_ring();
}
