#include "py_handoff.h"

#include <math.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "handoff.h"
#include "py_error.h"

/* How long the main thread waits before it looks at signals. */
#define SIGNAL_SLICE_MS 100

typedef struct py_handoff {
  PyObject_HEAD
  fdp_handoff slot;
  /* What traverse shows to the garbage collector. The reference itself is the slot's. For a moment
   * this may name an item that a taker has already, which is harmless: the taker holds self too. */
  PyObject *_Atomic inside; /* putter and taker may have it at once where there is no GIL */
  atomic_flag putting; /* handoff.h allows one producer and one consumer */
  atomic_flag taking;
} py_handoff;

static PyObject *handoff_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  py_handoff *self;

  if (PyTuple_GET_SIZE(arguments) > 0 || (keywords != NULL && PyDict_GET_SIZE(keywords) > 0)) {
    PyErr_SetString(PyExc_TypeError, "Handoff() takes no arguments");
    return NULL;
  }
  self = (py_handoff *)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  fdp_handoff_init(&self->slot);
  atomic_flag_clear(&self->putting);
  atomic_flag_clear(&self->taking);
  return (PyObject *)self;
}

static int handoff_traverse(PyObject *object, visitproc visit, void *arg) {
  PyObject *inside = ((py_handoff *)object)->inside;

  Py_VISIT(Py_TYPE(object));
  Py_VISIT(inside);
  return 0;
}

/* Nobody waits here any more: a waiting thread would hold a reference. */
static int handoff_clear(PyObject *object) {
  py_handoff *self = (py_handoff *)object;
  void *item = NULL;

  self->inside = NULL;
  fdp_handoff_close(&self->slot);
  if (fdp_handoff_take(&self->slot, 0, &item) == FDP_OK) Py_DECREF((PyObject *)item);
  return 0;
}

static void handoff_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);

  PyObject_GC_UnTrack(self);
  handoff_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *handoff_put(PyObject *object, PyObject *item) {
  py_handoff *self = (py_handoff *)object;
  PyObject *former = self->inside;
  bool has_sleeper = false;
  fdp_status status;

  if (atomic_flag_test_and_set(&self->putting)) {
    PyErr_SetString(PyExc_RuntimeError, "put: another thread is putting an item");
    return NULL;
  }
  /* Before the item is seen: the taker may have it, and drop it, as soon as it is in. */
  Py_INCREF(item);
  self->inside = item;
  status = fdp_handoff_put_nowake(&self->slot, item, &has_sleeper);
  atomic_flag_clear(&self->putting);
  /* Without the GIL, which the taker wants as soon as it is awake: to wake it only to let it sleep
   * again would double the cost of the whole. */
  if (has_sleeper) {
    Py_BEGIN_ALLOW_THREADS
    fdp_handoff_wake(&self->slot);
    Py_END_ALLOW_THREADS
  }
  if (status == FDP_OK) Py_RETURN_NONE;
  self->inside = former;
  Py_DECREF(item);
  if (status == FDP_INVALID_ARGUMENT) {
    PyErr_SetString(PyExc_RuntimeError, fdp_last_message());
    return NULL;
  }
  return fdp_py_raise(fdp_py_state_of(object), status);
}

/* True on the thread that runs Python's signal handlers. After a fork that is the process's first
 * thread whatever the parent's was, which the second half sees. */
static bool is_main_thread(const fdp_py_state *state) {
  return PyThread_get_thread_ident() == state->main_thread ||
         syscall(SYS_gettid) == getpid();
}

/* Waits without the GIL until there is an item, time is up, or the slot is closed. -1 when a signal
 * handler raised. */
static int wait_for_item(fdp_py_state *state, py_handoff *self, int64_t timeout_ms, void **item,
                         fdp_status *status) {
  bool signals = is_main_thread(state);
  int64_t deadline_ns = fdp_clock_ns() + timeout_ms * 1000000;

  for (;;) {
    int64_t left_ms = -1;

    /* Rounded up, so that a wait is never shorter than asked for. */
    if (timeout_ms >= 0) left_ms = (deadline_ns - fdp_clock_ns() + 999999) / 1000000;
    if (timeout_ms >= 0 && left_ms < 0) left_ms = 0;
    if (signals && (left_ms < 0 || left_ms > SIGNAL_SLICE_MS)) left_ms = SIGNAL_SLICE_MS;
    Py_BEGIN_ALLOW_THREADS
    *status = fdp_handoff_take(&self->slot, left_ms, item);
    Py_END_ALLOW_THREADS
    if (*status != FDP_TIMED_OUT) return 0;
    if (PyErr_CheckSignals() < 0) return -1;
    /* Not yet the deadline: a slice is over, or a signal ended the wait early. */
    if (timeout_ms >= 0 && fdp_clock_ns() >= deadline_ns) return 0;
  }
}

static int read_timeout(PyObject *object, int64_t *timeout_ms) {
  double timeout_s = PyFloat_AsDouble(object);

  if (timeout_s == -1.0 && PyErr_Occurred()) return -1;
  if (isnan(timeout_s)) {
    PyErr_SetString(PyExc_ValueError, "timeout_s: must be a number, got nan");
    return -1;
  }
  /* 1e9 seconds, some 30 years, are for ever: nanoseconds stay inside 64 bits. */
  *timeout_ms = timeout_s < 0 || timeout_s > 1e9 ? -1 : (int64_t)ceil(timeout_s * 1e3);
  return 0;
}

static PyObject *handoff_take(PyObject *object, PyObject *timeout) {
  fdp_py_state *state = fdp_py_state_of(object);
  py_handoff *self = (py_handoff *)object;
  fdp_status status = FDP_TIMED_OUT;
  int64_t timeout_ms;
  void *item = NULL;
  PyObject *inside;
  int result = 0;

  if (read_timeout(timeout, &timeout_ms) < 0) return NULL;
  if (atomic_flag_test_and_set(&self->taking)) {
    PyErr_SetString(PyExc_RuntimeError, "take: another thread is waiting for an item");
    return NULL;
  }
  /* An item that is there already is taken at once: no need to give up the GIL, or to sleep. */
  if (self->inside != NULL || timeout_ms == 0) status = fdp_handoff_take(&self->slot, 0, &item);
  if (status == FDP_TIMED_OUT && timeout_ms != 0)
    result = wait_for_item(state, self, timeout_ms, &item, &status);
  atomic_flag_clear(&self->taking);
  if (result < 0) return NULL;
  if (status == FDP_TIMED_OUT) {
    /* The core's message has the length of the last slice. */
    PyErr_Format(state->timeout_error, "take: no item came within %R s", timeout);
    return NULL;
  }
  if (status != FDP_OK) return fdp_py_raise(state, status);
  /* Another item may be in already. If it is the same object, the collector merely misses it. */
  inside = item;
  atomic_compare_exchange_strong(&self->inside, &inside, NULL);
  return item;
}

static PyObject *handoff_close(PyObject *object, PyObject *unused) {
  (void)unused;
  fdp_handoff_close(&((py_handoff *)object)->slot);
  Py_RETURN_NONE;
}

static PyMethodDef handoff_methods[] = {
    {"put", handoff_put, METH_O,
     PyDoc_STR("put($self, item, /)\n--\n\n"
               "Hands the item over. RuntimeError when one is still in it, "
               "AbortedError when closed.")},
    {"take", handoff_take, METH_O,
     PyDoc_STR("take($self, timeout_s, /)\n--\n\n"
               "Waits for the item, at most so many seconds (negative: "
               "for ever).")},
    {"close", handoff_close, METH_NOARGS,
     PyDoc_STR("close($self, /)\n--\n\n"
               "No item comes any more: wakes whoever waits with AbortedError.")},
    {NULL, NULL, 0, NULL}};

static PyType_Slot handoff_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Handoff()\n--\n\nA slot for one object between two threads.")},
    {Py_tp_new, (void *)handoff_new},
    {Py_tp_dealloc, (void *)handoff_dealloc},
    {Py_tp_traverse, (void *)handoff_traverse},
    {Py_tp_clear, (void *)handoff_clear},
    {Py_tp_methods, handoff_methods},
    {0, NULL}};

static PyType_Spec handoff_spec = {
    .name = "fastdp._C.Handoff",
    .basicsize = sizeof(py_handoff),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = handoff_slots,
};

int fdp_py_handoff_add(PyObject *module) {
  fdp_py_state *state = PyModule_GetState(module);

  state->handoff_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handoff_spec, NULL);
  return state->handoff_type == NULL ? -1 : PyModule_AddType(module, state->handoff_type);
}
