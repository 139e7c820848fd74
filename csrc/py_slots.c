#include "py_slots.h"

#include "bucket_slots.h"
#include "py_borrow.h"
#include "py_bucket.h"
#include "py_layout.h"

/* One slot: the piece of the buffer that begins with it, and the shape and strides that the piece
 * takes on in place; NULL where it has them already. */
typedef struct cut {
  int32_t piece;
  PyObject *shape, *strides;
} cut;

struct fdp_py_cuts {
  int64_t length_elems; /* of the buffers that it was made for */
  PyObject *sizes;      /* list: elements of each piece, gaps between slots included */
  int32_t count;
  cut items[];
};

void fdp_py_cuts_free(fdp_py_cuts *cuts) {
  if (cuts == NULL) return;
  for (int32_t i = 0; i < cuts->count; i++) {
    Py_XDECREF(cuts->items[i].shape);
    Py_XDECREF(cuts->items[i].strides);
  }
  Py_XDECREF(cuts->sizes);
  PyMem_Free(cuts);
}

static int add_piece(fdp_py_cuts *cuts, int64_t size_elems) {
  PyObject *size = PyLong_FromLongLong(size_elems);
  int result = size == NULL ? -1 : PyList_Append(cuts->sizes, size);

  Py_XDECREF(size);
  return result;
}

/* A slot of one dimension is a piece as it stands, and what lies behind it a piece of its own: one
 * piece more costs a third of changing a shape. Every other slot takes on its shape. */
static int cut_slot(const fdp_bucket *plan, int32_t i, int64_t begin, int64_t end, cut *item,
                    fdp_py_cuts *cuts) {
  fdp_view slot = fdp_bucket_slot(plan, i, NULL, (fdp_device_id){FDP_DEVICE_HOST, 0});

  item->piece = (int32_t)PyList_GET_SIZE(cuts->sizes);
  if (slot.ndim == 1 && (slot.strides[0] == 1 || slot.shape[0] <= 1)) {
    if (add_piece(cuts, slot.shape[0]) < 0) return -1;
    end -= slot.shape[0];
    return end > begin ? add_piece(cuts, end - begin) : 0;
  }
  item->shape = fdp_py_integers(slot.shape, slot.ndim);
  item->strides = fdp_py_integers(slot.strides, slot.ndim);
  if (item->shape == NULL || item->strides == NULL) return -1;
  return add_piece(cuts, end - begin);
}

static fdp_py_cuts *make_cuts(const fdp_bucket *plan, int64_t length_elems) {
  int32_t count = fdp_bucket_count(plan);
  int64_t item_bytes = (int64_t)fdp_dtype_bytes(plan->dtype);
  fdp_py_cuts *cuts = PyMem_Calloc(1, sizeof *cuts + (size_t)count * sizeof cuts->items[0]);
  int64_t end = 0;

  if (cuts == NULL) return (fdp_py_cuts *)PyErr_NoMemory();
  cuts->length_elems = length_elems;
  cuts->sizes = PyList_New(0);
  if (cuts->sizes == NULL) goto failed;
  if (fdp_bucket_offset_bytes(plan, 0) > 0 &&
      add_piece(cuts, fdp_bucket_offset_bytes(plan, 0) / item_bytes) < 0)
    goto failed;
  for (int32_t i = 0; i < count; i++) {
    int64_t begin = fdp_bucket_offset_bytes(plan, i) / item_bytes;

    end = i + 1 < count ? fdp_bucket_offset_bytes(plan, i + 1) / item_bytes : length_elems;
    cuts->count = i + 1;
    if (cut_slot(plan, i, begin, end, &cuts->items[i], cuts) < 0) goto failed;
  }
  return cuts;
failed:
  fdp_py_cuts_free(cuts);
  return NULL;
}

/* The cuts for buffers of that length: borrowed from the bucket. */
static const fdp_py_cuts *find_cuts(fdp_py_bucket *bucket, int64_t length_elems) {
  fdp_py_cuts *made;

  if (bucket->cuts != NULL && bucket->cuts->length_elems == length_elems) return bucket->cuts;
  made = make_cuts(bucket->plan, length_elems);
  if (made == NULL) return NULL;
  fdp_py_cuts_free(bucket->cuts);
  bucket->cuts = made;
  return made;
}

static int take_on_shape(PyObject *piece, const cut *item, PyObject *method) {
  PyObject *arguments[3] = {piece, item->shape, item->strides};
  PyObject *result = PyObject_VectorcallMethod(method, arguments, 3, NULL);

  Py_XDECREF(result);
  return result == NULL ? -1 : 0;
}

static PyObject *split(const fdp_py_cuts *cuts, const fdp_py_names *names, PyObject *flat) {
  PyObject *arguments[2] = {flat, cuts->sizes};
  PyObject *pieces = PyObject_VectorcallMethod(names->unsafe_split, arguments, 2, NULL);
  PyObject *slots = NULL;
  Py_ssize_t count;

  if (pieces == NULL) return NULL;
  count = PyList_GET_SIZE(cuts->sizes);
  if (!PyTuple_Check(pieces) || PyTuple_GET_SIZE(pieces) != count) {
    PyErr_Format(PyExc_TypeError, "unsafe_split_with_sizes: expected a tuple of %zd tensors, got "
                 "%R", count, pieces);
    goto done;
  }
  slots = PyTuple_New(cuts->count);
  for (int32_t i = 0; slots != NULL && i < cuts->count; i++) {
    const cut *item = &cuts->items[i];
    PyObject *piece = PyTuple_GET_ITEM(pieces, item->piece);

    if (item->shape != NULL && take_on_shape(piece, item, names->as_strided_in_place) < 0)
      Py_CLEAR(slots);
    else
      PyTuple_SET_ITEM(slots, i, Py_NewRef(piece));
  }
done:
  Py_DECREF(pieces);
  return slots;
}

PyObject *fdp_py_bucket_split(PyObject *self, PyObject *flat) {
  static const fdp_py_argument argument = {"flat", -1, -1};
  fdp_py_bucket *bucket = (fdp_py_bucket *)self;
  const fdp_py_cuts *cuts;
  fdp_py_borrower borrower;
  PyObject *result = NULL;
  fdp_status status;
  fdp_view view;

  fdp_py_borrower_open(&borrower, fdp_py_state_of(self));
  if (fdp_py_borrow(&borrower, flat, FDP_PY_WRITE, &argument, &view) < 0) goto done;
  status = fdp_bucket_check_flat(bucket->plan, &view, "bucket split", "flat", -1);
  if (status != FDP_OK) {
    fdp_py_raise(borrower.state, status);
    goto done;
  }
  cuts = find_cuts(bucket, view.shape[0]);
  if (cuts != NULL) result = split(cuts, &borrower.state->names, flat);
done:
  fdp_py_borrower_close(&borrower);
  return result;
}

static int expect_tuple(PyObject *object, const char *name) {
  if (PyTuple_Check(object)) return 0;
  PyErr_Format(PyExc_TypeError, "%s: expected a tuple, got %.200s", name,
               Py_TYPE(object)->tp_name);
  return -1;
}

PyObject *fdp_py_become(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  fdp_py_state *state = PyModule_GetState(module);

  if (fdp_py_expect_count("become", count, 2) < 0) return NULL;
  if (expect_tuple(arguments[0], "tensors") < 0 || expect_tuple(arguments[1], "kinds") < 0)
    return NULL;
  if (PyTuple_GET_SIZE(arguments[0]) != PyTuple_GET_SIZE(arguments[1])) {
    PyErr_Format(PyExc_ValueError, "kinds: %zd classes, must be %zd as there are tensors",
                 PyTuple_GET_SIZE(arguments[1]), PyTuple_GET_SIZE(arguments[0]));
    return NULL;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[0]); i++) {
    PyObject *kind = PyTuple_GET_ITEM(arguments[1], i);

    if (kind == Py_None) continue;
    if (PyObject_SetAttr(PyTuple_GET_ITEM(arguments[0], i), state->names.class_, kind) < 0)
      return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *make_alias(const fdp_py_names *names, PyObject *tensor, PyObject *kind,
                            PyObject *otherwise) {
  PyObject *alias;

  if ((PyObject *)Py_TYPE(tensor) != kind) return PyObject_CallOneArg(otherwise, tensor);
  alias = PyObject_CallMethodNoArgs(tensor, names->detach);
  if (alias != NULL && PyObject_SetAttr(alias, names->class_, kind) < 0) Py_CLEAR(alias);
  return alias;
}

PyObject *fdp_py_aliases(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  fdp_py_state *state = PyModule_GetState(module);
  PyObject *aliases;

  if (fdp_py_expect_count("aliases", count, 3) < 0) return NULL;
  if (expect_tuple(arguments[0], "tensors") < 0) return NULL;
  aliases = PyTuple_New(PyTuple_GET_SIZE(arguments[0]));
  for (Py_ssize_t i = 0; aliases != NULL && i < PyTuple_GET_SIZE(arguments[0]); i++) {
    PyObject *alias = make_alias(&state->names, PyTuple_GET_ITEM(arguments[0], i), arguments[1],
                                 arguments[2]);

    if (alias == NULL) Py_CLEAR(aliases);
    else PyTuple_SET_ITEM(aliases, i, alias);
  }
  return aliases;
}
