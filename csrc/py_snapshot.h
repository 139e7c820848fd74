/* Snapshot: what Python code could read in the attributes of some modules at one moment, and
 * whether it still does. Made once, asked at every step.
 *
 * It is flat: boxes (the attributes of a module, a list, a dictionary, ...) and their entries, in
 * breadth-first order, so that asking is one loop over each. It owns every value that it compares,
 * in one list, and no module: of a module it has the address and a weak reference, which is asked
 * first; of a method bound to a module, the function and the module's address. While it owns an
 * object no other can have that address, so equal addresses mean that nothing was replaced.
 *
 * Used under the GIL, one call at a time. Asking runs no code of the values': only exact types of
 * the interpreter (and torch.device) are compared by value. No streams. */
#ifndef FDP_PY_SNAPSHOT_H
#define FDP_PY_SNAPSHOT_H

#include "py_state.h"

/* Containers are looked into this deep: 1 is a container that is an attribute itself. */
#define FDP_SNAPSHOT_DEPTH 4
/* Entries of containers in one snapshot, the dictionaries of children, parameters and buffers not
 * counted. A container with more than are left is known by its
 * identity and its length. */
#define FDP_SNAPSHOT_ENTRIES 8192

typedef enum fdp_box_kind {
  FDP_BOX_MODULE,  /* the attribute dictionary of a module */
  FDP_BOX_RECORD,  /* the attribute dictionary of an object that is plain data */
  FDP_BOX_DICT,    /* a dict, or the dictionary part of a subclass */
  FDP_BOX_ORDERED, /* an OrderedDict, whose order can change alone */
  FDP_BOX_TENSORS, /* "_parameters" or "_buffers": the names, and which are None */
  FDP_BOX_LIST,
  FDP_BOX_TUPLE, /* cannot change itself: it is here for what lies in it */
  FDP_BOX_SET,
  FDP_BOX_DEQUE,
  FDP_BOX_LARGE /* past the bound: only its length is compared */
} fdp_box_kind;

typedef struct fdp_box_entry {
  PyObject *key;   /* NULL in sequences and sets */
  PyObject *value; /* in FDP_BOX_TENSORS: None, or NULL for a tensor */
  /* The address of one of the modules, never followed: the entry is that module (`value` is NULL),
   * or a method of it (`value` is its function). Else NULL. */
  PyObject *self;
} fdp_box_entry;

typedef struct fdp_box {
  PyObject *object; /* NULL in a module's box, whose index is the module's */
  Py_ssize_t first, count;
  Py_ssize_t parent, place; /* the box and the entry (of all) that hold the object; -1 */
  fdp_box_kind kind;
  int depth;
} fdp_box;

/* A tensor that is neither parameter nor buffer. Its elements may change, but not move; on the host
 * they may not change either (a recording holds them by value). -1: the tensor cannot tell. */
typedef struct fdp_box_tensor {
  Py_ssize_t box, entry;
  long long address, version;
} fdp_box_tensor;

typedef struct fdp_snapshot {
  PyObject_HEAD
  PyObject *kept;    /* list that owns all keys, values, functions and types; NULL: taken apart */
  PyObject *weak;    /* tuple of weak references to the modules */
  PyTypeObject **types; /* of the modules; owned by `kept` */
  Py_ssize_t module_count;
  fdp_box *boxes;
  Py_ssize_t box_count, box_capacity;
  fdp_box_entry *entries;
  Py_ssize_t entry_count, entry_capacity;
  fdp_box_tensor *tensors;
  Py_ssize_t tensor_count, tensor_capacity;
  PyObject *data_ptr, *version; /* interned names */
} fdp_snapshot;

/* Adds the type Snapshot to the extension module. */
int fdp_py_snapshot_add(PyObject *module);

/* Fills a new snapshot (py_snapshot_fill.c). `records`: tuple of classes whose objects are plain
 * data. -1 with an exception. */
int fdp_snapshot_fill(fdp_snapshot *snapshot, fdp_py_state *state, PyObject *modules,
                      PyObject *records);

/* The items of a container, past any __len__ of a subclass; -1 with an exception. */
Py_ssize_t fdp_snapshot_size(PyObject *object);
/* What a tensor says of itself now; -1 where it cannot tell. */
long long fdp_snapshot_address(const fdp_snapshot *snapshot, PyObject *tensor);
long long fdp_snapshot_version(const fdp_snapshot *snapshot, PyObject *tensor);

/* New reference: None, or a text that names the first difference (py_difference.c). NULL with an
 * exception. */
PyObject *fdp_difference_find(const fdp_snapshot *snapshot);

/* New reference: the text of a difference that was seen in box `b`, which holds or is now `now`
 * (the dictionary of a module or record, else the container); None if it comes to nothing, since
 * the order of attributes does not count (py_difference_text.c). */
PyObject *fdp_difference_text(const fdp_snapshot *snapshot, Py_ssize_t b, PyObject *now);
/* The text that something (a format for the path of the entry) happened to one entry. */
PyObject *fdp_difference_entry(const fdp_snapshot *snapshot, Py_ssize_t b, Py_ssize_t entry,
                               const char *what);

/* Equal for all that Python code can see, identity apart. */
bool fdp_difference_same(PyObject *old, PyObject *now);
bool fdp_difference_same_entry(fdp_box_kind kind, const fdp_box_entry *entry, PyObject *value);

#endif
