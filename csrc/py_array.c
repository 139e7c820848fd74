#include "py_array.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "py_borrow.h"
#include "py_layout.h"
#include "py_stream.h"

/* The memory and what describes it. Counted: the Array is one user, every exported tensor another.
 * The device it came from is never closed (py_module.c), so the last user may go at any time. */
typedef struct array_block {
  atomic_int_least32_t users;
  fdp_device *device;
  fdp_view view; /* contiguous */
} array_block;

typedef struct py_array {
  PyObject_HEAD
  array_block *block;
} py_array;

/* Both forms of an exported tensor; the one that is handed out points back here. */
typedef struct array_export {
  array_block *block;
  union {
    DLManagedTensorVersioned versioned;
    DLManagedTensor legacy;
  };
} array_export;

static void block_release(array_block *block) {
  if (block == NULL) return;
  if (atomic_fetch_sub_explicit(&block->users, 1, memory_order_acq_rel) != 1) return;
  if (block->view.data != NULL) block->device->ops->memory_drop(block->device, block->view.data);
  free(block);
}

/* Memory for `view`, whose data is ignored. NULL with an error set. */
static array_block *block_make(fdp_py_state *state, const fdp_view *view) {
  fdp_context *context = fdp_py_context(state);
  array_block *block = NULL;
  int64_t size_bytes = fdp_view_size_bytes(view);
  fdp_status status;

  if (context == NULL) return NULL;
  block = malloc(sizeof *block);
  if (block == NULL) {
    PyErr_NoMemory();
    return NULL;
  }
  atomic_init(&block->users, 1);
  block->view = *view;
  block->view.data = NULL;
  block->view.device = fdp_device_place(view->device); /* memory of ours is never pinned */
  Py_BEGIN_ALLOW_THREADS
  status = fdp_context_device(context, view->device, &block->device);
  if (status == FDP_OK && size_bytes > 0)
    status = fdp_device_memory_take(block->device, (size_t)size_bytes, &block->view.data);
  Py_END_ALLOW_THREADS
  if (status == FDP_OK) return block;
  free(block);
  fdp_py_raise(state, status);
  return NULL;
}

/* Integers of a tuple into `values`, each between `least` and `most`. */
static int read_tuple(PyObject *tuple, const char *name, Py_ssize_t least_count,
                      Py_ssize_t most_count, int64_t most, int64_t *values) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) < least_count ||
      PyTuple_GET_SIZE(tuple) > most_count) {
    PyErr_Format(PyExc_TypeError, "%s: expected a tuple of %zd to %zd integers, got %R", name,
                 least_count, most_count, tuple);
    return -1;
  }
  for (int32_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    if (values[i] == -1 && PyErr_Occurred()) return -1;
    if (values[i] < 0 || values[i] > most) {
      PyErr_Format(PyExc_ValueError, "%s[%d]: %lld, must be 0 to %lld", name, (int)i,
                   (long long)values[i], (long long)most);
      return -1;
    }
  }
  return 0;
}

/* Fills `view` from the constructor's arguments and checks that its size can be counted. */
static int read_view(fdp_py_state *state, PyObject *arguments, fdp_view *view) {
  PyObject *shape = PyTuple_GET_ITEM(arguments, 0);
  int64_t numbers[3];
  int64_t stride = 1;
  fdp_status status;

  if (read_tuple(shape, "shape", 0, FDP_MAX_DIMS, INT64_MAX, view->shape) < 0) return -1;
  if (read_tuple(PyTuple_GET_ITEM(arguments, 1), "dtype", 3, 3, UINT8_MAX, numbers) < 0) return -1;
  view->dtype = (fdp_dtype){(uint8_t)numbers[0], (uint8_t)numbers[1], (uint16_t)numbers[2]};
  if (read_tuple(PyTuple_GET_ITEM(arguments, 2), "device", 2, 2, INT32_MAX, numbers) < 0)
    return -1;
  view->device = (fdp_device_id){(int32_t)numbers[0], (int32_t)numbers[1]};
  view->ndim = (int32_t)PyTuple_GET_SIZE(shape);
  for (int32_t i = view->ndim - 1; i >= 0; i--) {
    int64_t size = view->shape[i] > 0 ? view->shape[i] : 1;

    view->strides[i] = stride;
    if (__builtin_mul_overflow(stride, size, &stride)) {
      PyErr_Format(PyExc_ValueError, "shape: %R has too many elements", shape);
      return -1;
    }
  }
  /* Any aligned address that is not NULL stands for the memory that is still to come. */
  view->data = (void *)(uintptr_t)4096;
  status = fdp_view_check(view, "shape");
  if (status != FDP_OK) fdp_py_raise(state, status);
  return status == FDP_OK ? 0 : -1;
}

static PyObject *array_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  fdp_py_state *state = PyType_GetModuleState(type);
  py_array *self = NULL;
  fdp_view view;

  if (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) {
    PyErr_SetString(PyExc_TypeError, "Array() takes no keyword arguments");
    return NULL;
  }
  if (fdp_py_expect_count("Array", PyTuple_GET_SIZE(arguments), 3) < 0) return NULL;
  if (read_view(state, arguments, &view) < 0) return NULL;
  self = (py_array *)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  self->block = block_make(state, &view);
  if (self->block == NULL) Py_CLEAR(self);
  return (PyObject *)self;
}

static int array_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  return 0;
}

static void array_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);

  PyObject_GC_UnTrack(self);
  block_release(((py_array *)self)->block);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *array_shape(PyObject *self, void *unused) {
  const fdp_view *view = &((py_array *)self)->block->view;

  (void)unused;
  return fdp_py_integers(view->shape, view->ndim);
}

static PyObject *array_dtype(PyObject *self, void *unused) {
  fdp_dtype dtype = ((py_array *)self)->block->view.dtype;

  (void)unused;
  return Py_BuildValue("(iii)", (int)dtype.code, (int)dtype.bits, (int)dtype.lanes);
}

static PyObject *array_dlpack_device(PyObject *self, PyObject *unused) {
  fdp_device_id device = ((py_array *)self)->block->view.device;

  (void)unused;
  return Py_BuildValue("(ii)", (int)device.kind, (int)device.ordinal);
}

static void export_drop(array_export *export) {
  block_release(export->block);
  free(export);
}

static void versioned_deleter(DLManagedTensorVersioned *tensor) {
  export_drop(tensor->manager_ctx);
}

static void legacy_deleter(DLManagedTensor *tensor) { export_drop(tensor->manager_ctx); }

/* Destructor of a capsule: drops the tensor unless somebody took it over (and renamed it). */
static void capsule_destructor(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    DLManagedTensorVersioned *tensor = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    tensor->deleter(tensor);
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    DLManagedTensor *tensor = PyCapsule_GetPointer(capsule, "dltensor");
    tensor->deleter(tensor);
  }
}

/* What __dlpack__ was asked for. */
typedef struct export_request {
  bool versioned;
  bool copy;
  bool order;          /* make `stream` wait for ours */
  fdp_stream *stream;  /* the consumer's */
} export_request;

static int read_max_version(PyObject *value, export_request *request) {
  int64_t numbers[2];

  request->versioned = false;
  if (value == Py_None) return 0;
  if (read_tuple(value, "max_version", 2, 2, INT32_MAX, numbers) < 0) return -1;
  request->versioned = numbers[0] >= DLPACK_MAJOR_VERSION;
  return 0;
}

/* Nothing is moved between devices here: another device than the array's own is refused. */
static int read_dl_device(PyObject *value, fdp_device_id own) {
  int64_t numbers[2];

  if (value == Py_None) return 0;
  if (read_tuple(value, "dl_device", 2, 2, INT32_MAX, numbers) < 0) return -1;
  if (numbers[0] == own.kind && numbers[1] == own.ordinal) return 0;
  PyErr_Format(PyExc_BufferError, "dl_device: (%d, %d), but the array is on (%d, %d)",
               (int)numbers[0], (int)numbers[1], (int)own.kind, (int)own.ordinal);
  return -1;
}

static int read_copy(PyObject *value, export_request *request) {
  int is_true = value == Py_None ? 0 : PyObject_IsTrue(value);

  request->copy = is_true > 0;
  return is_true < 0 ? -1 : 0;
}

/* The protocol's numbers: -1 no ordering, 1 or None the legacy default stream, 2 the per-thread one
 * (whose handle is that number too); 0 is forbidden. On the host only None and -1 mean anything. */
static int read_stream(PyObject *value, fdp_device_id own, export_request *request) {
  int64_t number = 1;

  request->order = false;
  request->stream = NULL;
  if (value != Py_None) {
    number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) return -1;
  }
  if (number == -1) return 0;
  if (own.kind != FDP_DEVICE_CUDA) {
    if (value == Py_None) return 0;
    PyErr_Format(PyExc_ValueError, "stream: %lld, must be None or -1 on the host",
                 (long long)number);
    return -1;
  }
  if (number <= 0) {
    PyErr_Format(PyExc_ValueError, "stream: %lld is no stream, must be -1, 1, 2 or a stream handle",
                 (long long)number);
    return -1;
  }
  request->order = true;
  request->stream = number == 1 ? NULL : (fdp_stream *)(uintptr_t)number;
  return 0;
}

static int read_request(fdp_py_state *state, fdp_device_id own, PyObject *const *values,
                        PyObject *keywords, export_request *request) {
  const fdp_py_names *names = &state->names;
  PyObject *stream = Py_None, *max_version = Py_None, *dl_device = Py_None, *copy = Py_None;

  for (Py_ssize_t i = 0; keywords != NULL && i < PyTuple_GET_SIZE(keywords); i++) {
    PyObject *name = PyTuple_GET_ITEM(keywords, i);

    if (PyUnicode_Compare(name, names->stream) == 0) stream = values[i];
    else if (PyUnicode_Compare(name, names->max_version) == 0) max_version = values[i];
    else if (PyUnicode_Compare(name, names->dl_device) == 0) dl_device = values[i];
    else if (PyUnicode_Compare(name, names->copy) == 0) copy = values[i];
    else {
      PyErr_Format(PyExc_TypeError, "__dlpack__() got an unexpected keyword argument '%U'", name);
      return -1;
    }
  }
  if (read_max_version(max_version, request) < 0) return -1;
  if (read_dl_device(dl_device, own) < 0) return -1;
  if (read_copy(copy, request) < 0) return -1;
  return read_stream(stream, own, request);
}

/* Runs the copy, if any, on the framework's stream and makes the consumer's stream follow it. */
static fdp_status fill_and_order(const array_block *source, array_block *target,
                                 const export_request *request, fdp_stream *ours) {
  fdp_device *device = source->device;
  int64_t size_bytes = fdp_view_size_bytes(&source->view);
  fdp_event *event = NULL;
  fdp_status status = FDP_OK;

  if (request->copy && size_bytes > 0)
    FDP_TRY(device->ops->copy(device, ours, target->view.data, source->view.data, size_bytes));
  if (!request->order || request->stream == ours) goto done;
  FDP_TRY(device->ops->event_open(device, &event));
  FDP_TRY(device->ops->event_record(device, event, ours));
  FDP_TRY(device->ops->stream_wait(device, request->stream, event));
done:
  if (event != NULL) device->ops->event_close(device, event);
  return status;
}

/* A capsule around `block`, whose reference it takes over; NULL with an error set. */
static PyObject *wrap(array_block *block, const export_request *request) {
  array_export *export = malloc(sizeof *export);
  DLTensor tensor = {
      .data = block->view.data,
      .device = {block->view.device.kind, block->view.device.ordinal},
      .ndim = block->view.ndim,
      .dtype = {block->view.dtype.code, block->view.dtype.bits, block->view.dtype.lanes},
      .shape = block->view.shape,
      .strides = block->view.strides,
  };
  PyObject *capsule;

  if (export == NULL) {
    block_release(block);
    return PyErr_NoMemory();
  }
  export->block = block;
  if (request->versioned) {
    export->versioned = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = export,
        .deleter = versioned_deleter,
        .flags = request->copy ? DLPACK_FLAG_BITMASK_IS_COPIED : 0,
        .dl_tensor = tensor,
    };
    capsule = PyCapsule_New(&export->versioned, "dltensor_versioned", capsule_destructor);
  } else {
    export->legacy = (DLManagedTensor){
        .dl_tensor = tensor, .manager_ctx = export, .deleter = legacy_deleter};
    capsule = PyCapsule_New(&export->legacy, "dltensor", capsule_destructor);
  }
  if (capsule == NULL) export_drop(export);
  return capsule;
}

static PyObject *array_dlpack(PyObject *object, PyObject *const *arguments, Py_ssize_t count,
                              PyObject *keywords) {
  fdp_py_state *state = fdp_py_state_of(object);
  array_block *own = ((py_array *)object)->block;
  array_block *block = NULL;
  fdp_stream *ours = NULL;
  export_request request;
  fdp_status status;

  if (fdp_py_expect_count("__dlpack__", count, 0) < 0) return NULL;
  if (read_request(state, own->view.device, arguments, keywords, &request) < 0) return NULL;
  if (fdp_py_stream_current(state, own->view.device, &ours) < 0) return NULL;
  if (request.copy) {
    block = block_make(state, &own->view);
    if (block == NULL) return NULL;
  } else {
    block = own;
    atomic_fetch_add_explicit(&own->users, 1, memory_order_relaxed);
  }
  Py_BEGIN_ALLOW_THREADS
  status = fill_and_order(own, block, &request, ours);
  Py_END_ALLOW_THREADS
  if (status == FDP_OK) return wrap(block, &request);
  fdp_py_raise(state, status); /* before the block goes: the message is this failure's */
  block_release(block);
  return NULL;
}

static PyMethodDef array_methods[] = {
    {"__dlpack__", (PyCFunction)(void *)array_dlpack, METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)"
               "\n--\n\nThe array as a DLPack capsule.")},
    {"__dlpack_device__", array_dlpack_device, METH_NOARGS,
     PyDoc_STR("__dlpack_device__($self, /)\n--\n\nDLPack's (kind, ordinal) of the device.")},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef array_getters[] = {
    {"shape", array_shape, NULL, PyDoc_STR("The sizes of the dimensions."), NULL},
    {"dtype", array_dtype, NULL, PyDoc_STR("DLPack's (code, bits, lanes)."), NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot array_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Array(shape, dtype, device, /)\n--\n\nMemory of the core's own "
                                  "as a DLPack producer. Not initialised.")},
    {Py_tp_new, (void *)array_new},
    {Py_tp_dealloc, (void *)array_dealloc},
    {Py_tp_traverse, (void *)array_traverse},
    {Py_tp_methods, array_methods},
    {Py_tp_getset, array_getters},
    {0, NULL}};

static PyType_Spec array_spec = {
    .name = "fastdp._C.Array",
    .basicsize = sizeof(py_array),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = array_slots,
};

int fdp_py_array_add(PyObject *module) {
  fdp_py_state *state = PyModule_GetState(module);

  state->array_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &array_spec, NULL);
  return state->array_type == NULL ? -1 : PyModule_AddType(module, state->array_type);
}
