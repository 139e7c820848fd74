#include "py_gate.h"

#include "py_error.h"
#include "py_stream.h"

/* Streams of which a gate remembers what they have waited for. A replica's forward seldom reads on
 * more than one; a stream that is forgotten waits again, which is right, and costs a call. */
#define GATE_STREAMS 4

typedef struct gate_pass {
  fdp_stream *stream;
  Py_ssize_t bucket; /* the last one that it has waited for */
} gate_pass;

typedef struct py_gate {
  PyObject_HEAD
  fdp_device_id device;
  PyObject *wait;       /* wait(event): the device's current stream waits for it */
  PyObject *raw_stream; /* raw_stream(index): that stream's handle, where no exchange table tells */
  PyObject *arrived;    /* tuple of events, one for each bucket */
  uint64_t forward;     /* counts close() */
  int pass_count, pass_next;
  gate_pass passes[GATE_STREAMS];
} py_gate;

static int current_stream(py_gate *gate, fdp_stream **stream) {
  fdp_py_state *state = fdp_py_state_of((PyObject *)gate);
  PyObject *index, *handle = NULL;

  if (state->stream_table != NULL) {
    if (fdp_py_stream_current(state, gate->device, stream) == 0) return 0;
    PyErr_Clear(); /* a torch without GPUs, whose streams somebody pretends */
  }
  index = PyLong_FromLong(gate->device.ordinal);
  if (index != NULL) handle = PyObject_CallOneArg(gate->raw_stream, index);
  Py_XDECREF(index);
  if (handle == NULL) return -1;
  *stream = PyLong_AsVoidPtr(handle);
  Py_DECREF(handle);
  return *stream == NULL && PyErr_Occurred() ? -1 : 0;
}

static gate_pass *find_pass(py_gate *gate, fdp_stream *stream) {
  for (int i = 0; i < gate->pass_count; i++)
    if (gate->passes[i].stream == stream) return &gate->passes[i];
  return NULL;
}

static void note_pass(py_gate *gate, fdp_stream *stream, Py_ssize_t bucket) {
  gate_pass *pass = find_pass(gate, stream);

  if (pass == NULL) {
    if (gate->pass_count < GATE_STREAMS) {
      pass = &gate->passes[gate->pass_count++];
    } else {
      pass = &gate->passes[gate->pass_next];
      gate->pass_next = (gate->pass_next + 1) % GATE_STREAMS;
    }
    *pass = (gate_pass){stream, bucket};
  }
  if (pass->bucket < bucket) pass->bucket = bucket;
}

static int wait_for_bucket(py_gate *gate, fdp_stream *stream, Py_ssize_t bucket) {
  PyObject *event = Py_NewRef(PyTuple_GET_ITEM(gate->arrived, bucket));
  PyObject *wait = Py_NewRef(gate->wait);
  uint64_t forward = gate->forward;
  PyObject *result = PyObject_CallOneArg(wait, event);

  Py_DECREF(wait);
  Py_DECREF(event);
  if (result == NULL) return -1;
  Py_DECREF(result);
  /* The call may have run other threads: what was waited for then is not what is to come now. */
  if (gate->forward == forward) note_pass(gate, stream, bucket);
  return 0;
}

int fdp_py_gate_pass(PyObject *object, Py_ssize_t bucket) {
  py_gate *gate = (py_gate *)object;
  fdp_stream *stream = NULL;
  const gate_pass *pass;

  if (bucket < 0 || gate->arrived == NULL || bucket >= PyTuple_GET_SIZE(gate->arrived)) return 0;
  if (current_stream(gate, &stream) < 0) return -1;
  pass = find_pass(gate, stream);
  if (pass != NULL && pass->bucket >= bucket) return 0;
  return wait_for_bucket(gate, stream, bucket);
}

static PyObject *gate_wait_for(PyObject *object, PyObject *bucket) {
  Py_ssize_t number = PyNumber_AsSsize_t(bucket, PyExc_OverflowError);

  if (number == -1 && PyErr_Occurred()) return NULL;
  if (fdp_py_gate_pass(object, number) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *gate_close(PyObject *object, PyObject *arrived) {
  py_gate *gate = (py_gate *)object;
  PyObject *events = PySequence_Tuple(arrived);

  if (events == NULL) return NULL;
  gate->forward++;
  gate->pass_count = gate->pass_next = 0;
  Py_XSETREF(gate->arrived, events);
  Py_RETURN_NONE;
}

static PyObject *gate_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  PyObject *wait, *raw_stream;
  py_gate *gate;
  int ordinal;

  if (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) {
    PyErr_SetString(PyExc_TypeError, "Gate() takes no keyword arguments");
    return NULL;
  }
  if (!PyArg_ParseTuple(arguments, "iOO:Gate", &ordinal, &wait, &raw_stream)) return NULL;
  if (ordinal < 0) {
    PyErr_Format(PyExc_ValueError, "ordinal: %d, must be 0 or more", ordinal);
    return NULL;
  }
  gate = (py_gate *)type->tp_alloc(type, 0);
  if (gate == NULL) return NULL;
  gate->device = (fdp_device_id){FDP_DEVICE_CUDA, ordinal};
  gate->wait = Py_NewRef(wait);
  gate->raw_stream = Py_NewRef(raw_stream);
  return (PyObject *)gate;
}

static int gate_traverse(PyObject *self, visitproc visit, void *arg) {
  py_gate *gate = (py_gate *)self;

  Py_VISIT(Py_TYPE(self));
  Py_VISIT(gate->wait);
  Py_VISIT(gate->raw_stream);
  Py_VISIT(gate->arrived);
  return 0;
}

/* The two functions stay: who reads a replica while the collector takes it apart still calls. */
static int gate_clear(PyObject *self) {
  Py_CLEAR(((py_gate *)self)->arrived);
  return 0;
}

static void gate_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  py_gate *gate = (py_gate *)self;

  PyObject_GC_UnTrack(self);
  Py_CLEAR(gate->arrived);
  Py_CLEAR(gate->raw_stream);
  Py_CLEAR(gate->wait);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMethodDef gate_methods[] = {
    {"close", gate_close, METH_O,
     PyDoc_STR("close($self, arrived, /)\n--\n\n"
               "A new forward: arrived[k] is recorded behind the copies of bucket k, in their "
               "order.")},
    {"wait_for", gate_wait_for, METH_O,
     PyDoc_STR("wait_for($self, bucket, /)\n--\n\n"
               "The device's current stream waits for the bucket, unless it has.")},
    {NULL, NULL, 0, NULL}};

static PyType_Slot gate_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Gate(ordinal, wait, raw_stream, /)\n--\n\n"
                                  "What the streams of one GPU have waited for.")},
    {Py_tp_new, (void *)gate_new},
    {Py_tp_dealloc, (void *)gate_dealloc},
    {Py_tp_traverse, (void *)gate_traverse},
    {Py_tp_clear, (void *)gate_clear},
    {Py_tp_methods, gate_methods},
    {0, NULL}};

static PyType_Spec gate_spec = {
    .name = "fastdp._C.Gate",
    .basicsize = sizeof(py_gate),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = gate_slots,
};

int fdp_py_gate_add(PyObject *module) {
  PyObject *type = PyType_FromModuleAndSpec(module, &gate_spec, NULL);
  int result = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);

  Py_XDECREF(type);
  return result;
}
