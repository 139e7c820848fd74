#include "py_slots.h"

#include <string.h>

#include "bucket_slots.h"
#include "py_bucket.h"
#include "py_layout.h"

/* Where a slot is found: in a piece of the buffer, or, with `run` >= 0, in a piece of a run.
 * `shape` and `strides` are what the piece takes on in place; NULL where it has them already. */
typedef struct cut {
  int32_t piece, run;
  PyObject *shape, *strides;
} cut;

/* Slots that lie one behind the other and differ in their first dimension only: one piece of the
 * buffer takes on a shape for all, and is split again along that dimension. */
typedef struct cut_run {
  int32_t piece;
  PyObject *shape, *strides;
  PyObject *rows; /* list: of each piece, gaps between slots included */
  Py_ssize_t row_count;
} cut_run;

struct fdp_py_cuts {
  int32_t holders;      /* the bucket, and the splits that run: torch lets go of the GIL */
  int64_t length_elems; /* of the buffers that it was made for */
  PyObject *sizes;      /* list: elements of each piece, gaps between slots included */
  Py_ssize_t piece_count;
  int32_t count, run_count;
  cut_run *runs;
  cut items[];
};

void fdp_py_cuts_drop(fdp_py_cuts *cuts) {
  if (cuts == NULL || --cuts->holders > 0) return;
  for (int32_t i = 0; i < cuts->count; i++) {
    Py_XDECREF(cuts->items[i].shape);
    Py_XDECREF(cuts->items[i].strides);
  }
  for (int32_t i = 0; i < cuts->run_count; i++) {
    Py_XDECREF(cuts->runs[i].shape);
    Py_XDECREF(cuts->runs[i].strides);
    Py_XDECREF(cuts->runs[i].rows);
  }
  PyMem_Free(cuts->runs);
  Py_XDECREF(cuts->sizes);
  PyMem_Free(cuts);
}

static fdp_view slot_view(const fdp_bucket *plan, int32_t i) {
  return fdp_bucket_slot(plan, i, NULL, (fdp_device_id){FDP_DEVICE_HOST, 0});
}

static int64_t slot_begin(const fdp_bucket *plan, int32_t i) {
  return fdp_bucket_offset_bytes(plan, i) / (int64_t)fdp_dtype_bytes(plan->dtype);
}

/* Where slot `i` ends and its gap begins: slots are dense. */
static int64_t slot_end(const fdp_bucket *plan, int32_t i) {
  return slot_begin(plan, i) + plan->slots[i].count_elems;
}

static int add_size(PyObject *list, int64_t size) {
  PyObject *number = PyLong_FromLongLong(size);
  int result = number == NULL ? -1 : PyList_Append(list, number);

  Py_XDECREF(number);
  return result;
}

/* What stands behind a slot is a piece of its own: that costs a third of changing a shape. */
static int add_gap(PyObject *list, int64_t size) { return size > 0 ? add_size(list, size) : 0; }

/* Elements of a slot's row, if rows along its first dimension lie one behind the other; else 0. */
static int64_t row_elems(const fdp_view *slot, int64_t count_elems) {
  if (slot->ndim < 2 || count_elems == 0) return 0;
  return slot->strides[0] * slot->shape[0] == count_elems ? slot->strides[0] : 0;
}

/* True if slot `i` goes on where the slot before it ends, but for whole rows. */
static bool continues(const fdp_bucket *plan, int32_t i) {
  fdp_view slot = slot_view(plan, i), before = slot_view(plan, i - 1);
  int64_t row = row_elems(&slot, plan->slots[i].count_elems);

  if (row == 0 || slot.ndim != before.ndim ||
      row != row_elems(&before, plan->slots[i - 1].count_elems))
    return false;
  for (int32_t d = 1; d < slot.ndim; d++)
    if (slot.shape[d] != before.shape[d] || slot.strides[d] != before.strides[d]) return false;
  return (slot_begin(plan, i) - slot_begin(plan, i - 1)) % row == 0;
}

/* The run of the slots `first` to `last`. */
static int cut_run_of(const fdp_bucket *plan, int32_t first, int32_t last, fdp_py_cuts *cuts) {
  fdp_view slot = slot_view(plan, first);
  int64_t row = row_elems(&slot, plan->slots[first].count_elems);
  cut_run *run = &cuts->runs[cuts->run_count++];
  int64_t shape[FDP_MAX_DIMS];

  memcpy(shape, slot.shape, (size_t)slot.ndim * sizeof shape[0]);
  shape[0] = (slot_end(plan, last) - slot_begin(plan, first)) / row;
  *run = (cut_run){(int32_t)PyList_GET_SIZE(cuts->sizes), fdp_py_integers(shape, slot.ndim),
                   fdp_py_integers(slot.strides, slot.ndim), PyList_New(0), 0};
  if (run->shape == NULL || run->strides == NULL || run->rows == NULL) return -1;
  for (int32_t i = first; i <= last; i++) {
    cut *item = &cuts->items[i];

    item->run = cuts->run_count - 1;
    item->piece = (int32_t)PyList_GET_SIZE(run->rows);
    if (add_size(run->rows, plan->slots[i].count_elems / row) < 0) return -1;
    if (i < last && add_gap(run->rows, (slot_begin(plan, i + 1) - slot_end(plan, i)) / row) < 0)
      return -1;
  }
  run->row_count = PyList_GET_SIZE(run->rows);
  return add_size(cuts->sizes, slot_end(plan, last) - slot_begin(plan, first));
}

static int cut_slot(const fdp_bucket *plan, int32_t i, fdp_py_cuts *cuts) {
  fdp_view slot = slot_view(plan, i);
  cut *item = &cuts->items[i];

  item->run = -1;
  item->piece = (int32_t)PyList_GET_SIZE(cuts->sizes);
  if (slot.ndim != 1 || (slot.strides[0] != 1 && slot.shape[0] > 1)) {
    item->shape = fdp_py_integers(slot.shape, slot.ndim);
    item->strides = fdp_py_integers(slot.strides, slot.ndim);
    if (item->shape == NULL || item->strides == NULL) return -1;
  }
  return add_size(cuts->sizes, plan->slots[i].count_elems);
}

static fdp_py_cuts *make_cuts(const fdp_bucket *plan, int64_t length_elems) {
  int32_t count = fdp_bucket_count(plan), last;
  fdp_py_cuts *cuts = PyMem_Calloc(1, sizeof *cuts + (size_t)count * sizeof cuts->items[0]);

  if (cuts == NULL) return (fdp_py_cuts *)PyErr_NoMemory();
  cuts->holders = 1;
  cuts->length_elems = length_elems;
  cuts->count = count;
  cuts->sizes = PyList_New(0);
  cuts->runs = PyMem_Calloc((size_t)count / 2 + 1, sizeof *cuts->runs);
  if (cuts->runs == NULL) PyErr_NoMemory();
  if (cuts->sizes == NULL || cuts->runs == NULL) goto failed;
  if (add_gap(cuts->sizes, slot_begin(plan, 0)) < 0) goto failed;
  for (int32_t i = 0; i < count; i = last + 1) {
    for (last = i; last + 1 < count && continues(plan, last + 1); last++) continue;
    if ((last > i ? cut_run_of(plan, i, last, cuts) : cut_slot(plan, i, cuts)) < 0) goto failed;
    int64_t next = last + 1 < count ? slot_begin(plan, last + 1) : length_elems;
    if (add_gap(cuts->sizes, next - slot_end(plan, last)) < 0) goto failed;
  }
  cuts->piece_count = PyList_GET_SIZE(cuts->sizes);
  return cuts;
failed:
  fdp_py_cuts_drop(cuts);
  return NULL;
}

/* The cuts for buffers of that length, to be dropped. */
static fdp_py_cuts *find_cuts(fdp_py_bucket *bucket, int64_t length_elems) {
  fdp_py_cuts *found = bucket->cuts;

  if (found == NULL || found->length_elems != length_elems) {
    found = make_cuts(bucket->plan, length_elems);
    if (found == NULL) return NULL;
    fdp_py_cuts_drop(bucket->cuts);
    bucket->cuts = found;
  }
  found->holders++;
  return found;
}

static int take_on_shape(const fdp_py_names *names, PyObject *piece, PyObject *shape,
                         PyObject *strides) {
  PyObject *arguments[3] = {piece, shape, strides};
  PyObject *result = PyObject_VectorcallMethod(names->as_strided_in_place, arguments, 3, NULL);

  Py_XDECREF(result);
  return result == NULL ? -1 : 0;
}

/* A tuple with one piece of the tensor for each of the sizes, along its first dimension. The list
 * is the tensor's to read, and a subclass's to change: `count` is how many are wanted. */
static PyObject *split_one(const fdp_py_names *names, PyObject *tensor, PyObject *sizes,
                           Py_ssize_t count) {
  PyObject *arguments[2] = {tensor, sizes};
  PyObject *pieces = PyObject_VectorcallMethod(names->unsafe_split, arguments, 2, NULL);

  if (pieces == NULL) return NULL;
  if (!PyTuple_Check(pieces) || PyTuple_GET_SIZE(pieces) != count) {
    PyErr_Format(PyExc_TypeError, "unsafe_split_with_sizes: expected a tuple of %zd tensors, got "
                 "%R", count, pieces);
    Py_CLEAR(pieces);
  }
  return pieces;
}

/* The pieces of every run: a tuple of tuples. */
static PyObject *split_runs(const fdp_py_cuts *cuts, const fdp_py_names *names,
                            PyObject *pieces) {
  PyObject *runs = PyTuple_New(cuts->run_count);

  for (int32_t i = 0; runs != NULL && i < cuts->run_count; i++) {
    const cut_run *run = &cuts->runs[i];
    PyObject *piece = PyTuple_GET_ITEM(pieces, run->piece), *rows = NULL;

    if (take_on_shape(names, piece, run->shape, run->strides) == 0)
      rows = split_one(names, piece, run->rows, run->row_count);
    if (rows == NULL)
      Py_CLEAR(runs);
    else
      PyTuple_SET_ITEM(runs, i, rows);
  }
  return runs;
}

static PyObject *split(const fdp_py_cuts *cuts, const fdp_py_names *names, PyObject *flat) {
  PyObject *pieces = split_one(names, flat, cuts->sizes, cuts->piece_count);
  PyObject *runs = pieces == NULL ? NULL : split_runs(cuts, names, pieces);
  PyObject *slots = runs == NULL ? NULL : PyTuple_New(cuts->count);

  for (int32_t i = 0; slots != NULL && i < cuts->count; i++) {
    const cut *item = &cuts->items[i];
    PyObject *from = item->run < 0 ? pieces : PyTuple_GET_ITEM(runs, item->run);
    PyObject *slot = PyTuple_GET_ITEM(from, item->piece);

    if (item->shape != NULL && take_on_shape(names, slot, item->shape, item->strides) < 0)
      Py_CLEAR(slots);
    else
      PyTuple_SET_ITEM(slots, i, Py_NewRef(slot));
  }
  Py_XDECREF(runs);
  Py_XDECREF(pieces);
  return slots;
}

PyObject *fdp_py_bucket_split(PyObject *self, PyObject *flat) {
  fdp_py_bucket *bucket = (fdp_py_bucket *)self;
  fdp_py_cuts *cuts;
  fdp_py_borrower borrower;
  PyObject *result = NULL;
  fdp_view view;

  fdp_py_borrower_open(&borrower, fdp_py_state_of(self));
  if (fdp_py_bucket_borrow_flat(bucket, &borrower, flat, "bucket split", &view) < 0) goto done;
  cuts = find_cuts(bucket, view.shape[0]);
  if (cuts != NULL) result = split(cuts, &borrower.state->names, flat);
  fdp_py_cuts_drop(cuts);
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
