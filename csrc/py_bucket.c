#include "py_bucket.h"

#include "bucket_slots.h"
#include "py_layout.h"
#include "py_slots.h"
#include "py_views.h"

int fdp_py_bucket_borrow_flat(const fdp_py_bucket *bucket, fdp_py_borrower *borrower,
                              PyObject *flat, const char *verb, fdp_view *view) {
  static const fdp_py_argument argument = {"flat", -1, -1};
  fdp_status status;

  if (fdp_py_borrow(borrower, flat, FDP_PY_WRITE, &argument, view) < 0) return -1;
  status = fdp_bucket_check_flat(bucket->plan, view, verb, "flat", -1);
  if (status == FDP_OK) return 0;
  fdp_py_raise(borrower->state, status);
  return -1;
}

/* The offsets that a caller gave, one for each prototype, in a block to be freed; NULL for None.
 * 0, or -1 with an error set. */
static int read_offsets(PyObject *given, int32_t count, int64_t **offsets_elems) {
  *offsets_elems = NULL;
  if (given == Py_None) return 0;
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != count) {
    PyErr_Format(PyExc_TypeError, "offsets: expected None or a tuple of %d integers", (int)count);
    return -1;
  }
  *offsets_elems = PyMem_Malloc((size_t)count * sizeof **offsets_elems + 1);
  if (*offsets_elems == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (int32_t i = 0; i < count; i++) {
    (*offsets_elems)[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
    if ((*offsets_elems)[i] == -1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

/* Whom the bucket is to be carried by; None is nobody in particular. 0, or -1 with an error set. */
static int demand(fdp_py_state *state, fdp_bucket *plan, PyObject *transport) {
  const char *name;
  fdp_status status;

  if (transport == Py_None) return 0;
  if (!PyUnicode_Check(transport)) {
    PyErr_Format(PyExc_TypeError, "transport: expected None or a str, got %.200s",
                 Py_TYPE(transport)->tp_name);
    return -1;
  }
  name = PyUnicode_AsUTF8(transport);
  if (name == NULL) return -1;
  status = fdp_bucket_demand(plan, name);
  if (status == FDP_OK) return 0;
  fdp_py_raise(state, status);
  return -1;
}

static PyObject *bucket_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  fdp_py_state *state = PyType_GetModuleState(type);
  fdp_py_borrower borrower;
  fdp_py_views prototypes = {0};
  fdp_py_bucket *self = NULL;
  Py_ssize_t given = PyTuple_GET_SIZE(arguments);
  int64_t *offsets_elems = NULL;
  int64_t item_bytes;
  int64_t size_bytes;
  fdp_status status;

  if (keywords != NULL && PyDict_GET_SIZE(keywords) > 0) {
    PyErr_SetString(PyExc_TypeError, "Bucket() takes no keyword arguments");
    return NULL;
  }
  if (given < 1 || given > 3) {
    PyErr_Format(PyExc_TypeError, "Bucket() takes 1 to 3 positional arguments, %zd given", given);
    return NULL;
  }
  fdp_py_borrower_open(&borrower, state);
  if (fdp_py_borrow_tuple(&borrower, PyTuple_GET_ITEM(arguments, 0), FDP_PY_READ, "prototypes",
                          false, &prototypes) < 0)
    goto done;
  if (given > 1 &&
      read_offsets(PyTuple_GET_ITEM(arguments, 1), prototypes.count, &offsets_elems) < 0)
    goto done;
  self = (fdp_py_bucket *)type->tp_alloc(type, 0);
  if (self == NULL) goto done;
  status = fdp_bucket_open(prototypes.items, offsets_elems, prototypes.count, &self->plan);
  if (status != FDP_OK) {
    self->plan = NULL;
    fdp_py_raise(state, status);
    Py_CLEAR(self);
    goto done;
  }
  if (given > 2 && demand(state, self->plan, PyTuple_GET_ITEM(arguments, 2)) < 0) {
    Py_CLEAR(self);
    goto done;
  }
  item_bytes = (int64_t)fdp_dtype_bytes(prototypes.items[0].dtype);
  size_bytes = fdp_bucket_size_bytes(self->plan);
  self->size_elems = size_bytes / item_bytes + (size_bytes % item_bytes != 0);
done:
  PyMem_Free(offsets_elems);
  fdp_py_views_drop(&prototypes);
  fdp_py_borrower_close(&borrower);
  return (PyObject *)self;
}

static int bucket_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  return 0;
}

static void bucket_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);

  PyObject_GC_UnTrack(self);
  fdp_py_cuts_drop(((fdp_py_bucket *)self)->cuts);
  fdp_bucket_close(((fdp_py_bucket *)self)->plan);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *bucket_number(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(fdp_bucket_number(((fdp_py_bucket *)self)->plan));
}

static PyObject *bucket_count(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(fdp_bucket_count(((fdp_py_bucket *)self)->plan));
}

static PyObject *bucket_size_bytes(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLongLong(fdp_bucket_size_bytes(((fdp_py_bucket *)self)->plan));
}

static PyObject *bucket_size_elems(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLongLong(((fdp_py_bucket *)self)->size_elems);
}

static PyObject *bucket_slots(PyObject *object, void *unused) {
  fdp_py_bucket *self = (fdp_py_bucket *)object;
  int32_t count = fdp_bucket_count(self->plan);
  PyObject *slots = PyTuple_New(count);

  (void)unused;
  for (int32_t i = 0; slots != NULL && i < count; i++) {
    fdp_view view = fdp_bucket_slot(self->plan, i, NULL, (fdp_device_id){FDP_DEVICE_HOST, 0});
    int64_t item_bytes = (int64_t)fdp_dtype_bytes(view.dtype);
    PyObject *shape = fdp_py_integers(view.shape, view.ndim);
    PyObject *strides = fdp_py_integers(view.strides, view.ndim);
    PyObject *slot = NULL;

    if (shape != NULL && strides != NULL)
      slot = Py_BuildValue(
          "(LOO)", (long long)(fdp_bucket_offset_bytes(self->plan, i) / item_bytes), shape,
          strides);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    if (slot == NULL)
      Py_CLEAR(slots);
    else
      PyTuple_SET_ITEM(slots, i, slot);
  }
  return slots;
}

static PyObject *bucket_broadcast(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
  fdp_py_state *state = fdp_py_state_of(object);
  const fdp_bucket *plan = ((fdp_py_bucket *)object)->plan;
  fdp_context *context = NULL;
  fdp_py_borrower borrower;
  fdp_py_views sources = {0};
  fdp_py_views flats = {0};
  fdp_stream *home_stream = NULL;
  PyObject *result = NULL;
  fdp_status status;

  if (fdp_py_expect_count("Bucket.broadcast", count, 2) < 0) return NULL;
  fdp_py_borrower_open(&borrower, state);
  if ((context = fdp_py_context(state)) == NULL) goto done;
  if (fdp_py_borrow_tuple(&borrower, arguments[0], FDP_PY_READ | FDP_PY_CHECK_BITS, "sources",
                          false, &sources) < 0)
    goto done;
  if (sources.count != fdp_bucket_count(plan)) {
    PyErr_Format(PyExc_ValueError, "sources: %d tensors, must be %d as the bucket has slots",
                 (int)sources.count, (int)fdp_bucket_count(plan));
    goto done;
  }
  if (fdp_py_borrow_stream(&borrower, sources.items[0].device, &home_stream) < 0)
    goto done;
  if (fdp_py_borrow_tuple(&borrower, arguments[1], FDP_PY_WRITE, "flats", true, &flats) < 0)
    goto done;
  Py_BEGIN_ALLOW_THREADS
  status = fdp_bucket_broadcast(context, plan, sources.items, home_stream, flats.items,
                                flats.streams, flats.count);
  Py_END_ALLOW_THREADS
  result = status == FDP_OK ? Py_NewRef(Py_None) : fdp_py_raise(state, status);
done:
  fdp_py_views_drop(&flats);
  fdp_py_views_drop(&sources);
  fdp_py_borrower_close(&borrower);
  return result;
}

/* The gradients of all ranks: count x rank_count pointers, NULL for None, into `views`. */
typedef struct gradient_table {
  fdp_view *views;
  const fdp_view **items;
  fdp_stream **rank_streams;
} gradient_table;

static void gradients_drop(gradient_table *table) {
  PyMem_Free(table->rank_streams);
  PyMem_Free(table->items);
  PyMem_Free(table->views);
}

/* Borrows one rank's tuple into the table and finds the rank's stream. */
static int gradients_borrow_rank(fdp_py_borrower *borrower, PyObject *gradients, int32_t rank,
                                 int32_t slot_count, gradient_table *table) {
  size_t first = (size_t)rank * (size_t)slot_count;
  const fdp_view *device_of = NULL; /* the rank's first gradient */

  if (!PyTuple_Check(gradients) || PyTuple_GET_SIZE(gradients) != slot_count) {
    PyErr_Format(PyExc_TypeError, "gradients[%d]: expected a tuple of %d gradients or None",
                 (int)rank, (int)slot_count);
    return -1;
  }
  table->rank_streams[rank] = NULL;
  for (int32_t slot = 0; slot < slot_count; slot++) {
    fdp_py_argument argument = {"gradients", rank, slot};
    PyObject *gradient = PyTuple_GET_ITEM(gradients, slot);
    fdp_view *view = &table->views[first + (size_t)slot];

    table->items[first + (size_t)slot] = NULL;
    if (gradient == Py_None) continue;
    if (fdp_py_borrow(borrower, gradient, FDP_PY_READ | FDP_PY_CHECK_BITS, &argument, view) < 0)
      return -1;
    table->items[first + (size_t)slot] = view;
    if (device_of == NULL) {
      device_of = view;
      if (fdp_py_borrow_stream(borrower, view->device, &table->rank_streams[rank]) < 0) return -1;
    }
  }
  return 0;
}

static int gradients_borrow(fdp_py_borrower *borrower, PyObject *gradients, int32_t slot_count,
                            gradient_table *table) {
  Py_ssize_t rank_count;
  size_t total;

  if (!PyTuple_Check(gradients)) {
    PyErr_Format(PyExc_TypeError, "gradients: expected a tuple of tuples, got %.200s",
                 Py_TYPE(gradients)->tp_name);
    return -1;
  }
  rank_count = PyTuple_GET_SIZE(gradients);
  if (rank_count < 1 || rank_count > FDP_MAX_REPLICAS) {
    PyErr_Format(PyExc_ValueError, "gradients: %zd ranks, must be 1 to %d", rank_count,
                 FDP_MAX_REPLICAS);
    return -1;
  }
  total = (size_t)rank_count * (size_t)slot_count;
  table->views = PyMem_Malloc(total * sizeof *table->views);
  table->items = PyMem_Malloc(total * sizeof *table->items);
  table->rank_streams = PyMem_Malloc((size_t)rank_count * sizeof *table->rank_streams);
  if (table->views == NULL || table->items == NULL || table->rank_streams == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (int32_t rank = 0; rank < rank_count; rank++) {
    if (gradients_borrow_rank(borrower, PyTuple_GET_ITEM(gradients, rank), rank, slot_count,
                              table) < 0)
      return -1;
  }
  return 0;
}

static PyObject *bucket_reduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
  static const fdp_py_argument flat_argument = {"flat", -1, -1};
  fdp_py_state *state = fdp_py_state_of(object);
  const fdp_bucket *plan = ((fdp_py_bucket *)object)->plan;
  fdp_context *context = NULL;
  fdp_py_borrower borrower;
  gradient_table table = {0};
  fdp_view flat;
  fdp_stream *flat_stream = NULL;
  PyObject *result = NULL;
  fdp_status status;

  if (fdp_py_expect_count("Bucket.reduce", count, 2) < 0) return NULL;
  fdp_py_borrower_open(&borrower, state);
  if ((context = fdp_py_context(state)) == NULL) goto done;
  if (gradients_borrow(&borrower, arguments[0], fdp_bucket_count(plan), &table) < 0) goto done;
  if (fdp_py_borrow(&borrower, arguments[1], FDP_PY_WRITE, &flat_argument, &flat) < 0) goto done;
  if (fdp_py_borrow_stream(&borrower, flat.device, &flat_stream) < 0) goto done;
  Py_BEGIN_ALLOW_THREADS
  status = fdp_bucket_reduce(context, plan, table.items, table.rank_streams,
                             (int32_t)PyTuple_GET_SIZE(arguments[0]), &flat, flat_stream);
  Py_END_ALLOW_THREADS
  result = status == FDP_OK ? Py_NewRef(Py_None) : fdp_py_raise(state, status);
done:
  gradients_drop(&table);
  fdp_py_borrower_close(&borrower);
  return result;
}

static PyMethodDef bucket_methods[] = {
    {"broadcast", (PyCFunction)(void *)bucket_broadcast, METH_FASTCALL,
     PyDoc_STR("broadcast($self, sources, flats, /)\n--\n\n"
               "Copies the sources into the slots of every "
               "flat buffer.")},
    {"reduce", (PyCFunction)(void *)bucket_reduce, METH_FASTCALL,
     PyDoc_STR("reduce($self, gradients, flat, /)\n--\n\n"
               "flat becomes the sum over the ranks, slot by "
               "slot; gradients[rank][slot] may be None.")},
    {"views", fdp_py_bucket_views, METH_O,
     PyDoc_STR("views($self, flat, /)\n--\n\n"
               "Every slot of flat as a tensor of its own, or None where "
               "the exchange table cannot make them.")},
    {"split", fdp_py_bucket_split, METH_O,
     PyDoc_STR("split($self, flat, /)\n--\n\n"
               "Every slot of a torch tensor as a tensor of its storage.")},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef bucket_getters[] = {
    {"number", bucket_number, NULL, PyDoc_STR("Its name in records."), NULL},
    {"count", bucket_count, NULL, PyDoc_STR("Number of slots."), NULL},
    {"size_bytes", bucket_size_bytes, NULL, PyDoc_STR("Size of a flat buffer."), NULL},
    {"size_elems", bucket_size_elems, NULL, PyDoc_STR("Length of a flat buffer in elements."),
     NULL},
    {"slots", bucket_slots, NULL,
     PyDoc_STR("(offset in elements, shape, strides in elements) of each slot."), NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot bucket_type_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Bucket(prototypes, offsets=None, transport=None, /)\n"
                                  "--\n\n"
                                  "The plan of a bucket: many tensors of one dtype in one flat "
                                  "buffer.")},
    {Py_tp_new, (void *)bucket_new},
    {Py_tp_dealloc, (void *)bucket_dealloc},
    {Py_tp_traverse, (void *)bucket_traverse},
    {Py_tp_methods, bucket_methods},
    {Py_tp_getset, bucket_getters},
    {0, NULL}};

static PyType_Spec bucket_spec = {
    .name = "fastdp._C.Bucket",
    .basicsize = sizeof(fdp_py_bucket),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = bucket_type_slots,
};

int fdp_py_bucket_add(PyObject *module) {
  fdp_py_state *state = PyModule_GetState(module);

  state->bucket_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &bucket_spec, NULL);
  return state->bucket_type == NULL ? -1 : PyModule_AddType(module, state->bucket_type);
}
