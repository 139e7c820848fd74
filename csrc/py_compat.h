/* Python.h, and the differences between CPython 3.10 and 3.14 that this extension meets: the only
 * file that asks for a version. Included before anything else in every py_*.c. */
#ifndef FDP_PY_COMPAT_H
#define FDP_PY_COMPAT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030A0000
#error "fastdp needs CPython 3.10 or newer"
#endif

/* Streams, communicators and torch are per process, so a second interpreter is refused. */
#if PY_VERSION_HEX >= 0x030C0000
#define FDP_PY_SLOT_INTERPRETERS \
  {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#else
#define FDP_PY_SLOT_INTERPRETERS
#endif

/* A free-threaded build turns the GIL on when it imports us. The code is written to do without it
 * (tuples in, no borrowed references out of lists or dicts), but Py_MOD_GIL_NOT_USED is a promise
 * that only a test run without the GIL can back, and only the seam was run so
 * (docs/reliability.md). */
#if PY_VERSION_HEX >= 0x030D0000
#define FDP_PY_SLOT_GIL {Py_mod_gil, Py_MOD_GIL_USED},
#else
#define FDP_PY_SLOT_GIL
#endif

/* The raised exception as one object, taken off the thread: new reference, NULL when none. */
static inline PyObject *fdp_py_error_take(void) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (type == NULL) return NULL;
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != NULL) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

/* What a weak reference points at: a new reference, NULL without an exception when it is gone. */
static inline PyObject *fdp_py_weakref_get(PyObject *weak) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *object = NULL;
  return PyWeakref_GetRef(weak, &object) < 0 ? NULL : object;
#else
  PyObject *object = PyWeakref_GetObject(weak);
  return object == Py_None ? NULL : Py_XNewRef(object);
#endif
}

/* A number that each write to the dictionary changes, and that no other dictionary has (PEP 509). 0
 * where there is none to rely on: from 3.13 on, an attribute that is set leaves it alone. In 3.11
 * and 3.12 the interpreter's own assignment of an attribute drops the old value before it writes
 * the number, so a destructor may still see the former one; torch's Modules assign in Python. */
static inline uint64_t fdp_py_dict_version(PyObject *dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  (void)dict;
  return 0;
#endif
}

/* Raises `error` again and takes the reference over. */
static inline void fdp_py_error_put(PyObject *error) {
#if PY_VERSION_HEX >= 0x030C0000
  PyErr_SetRaisedException(error);
#else
  PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

#endif
