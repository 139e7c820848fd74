/* The entries of a tree: see py_entries.h. One tensor under two names is one index: told by its
 * address, in a small hash table. */
#include "py_entries.h"

#include <string.h>

static int entries_push(fdp_tree_entries *list, PyObject *tensor, Py_ssize_t index)
{
  if (list->count == list->capacity) {
    Py_ssize_t capacity = list->capacity ? 2 * list->capacity : 64;
    fdp_tree_entry *grown = PyMem_Realloc(list->entries, (size_t)capacity * sizeof(*grown));
    if (grown == NULL) {
      PyErr_NoMemory();
      return -1;
    }
    list->entries = grown;
    list->capacity = capacity;
  }
  list->entries[list->count].tensor = tensor;
  list->entries[list->count].index = index;
  list->count++;
  return 0;
}

/* A set of pointers with their order of arrival: open addressing, kept under half full. */
typedef struct pointer_map {
  PyObject **keys;
  Py_ssize_t *indices;
  size_t mask;
  Py_ssize_t count;
} pointer_map;

static void pointer_map_free(pointer_map *map)
{
  PyMem_Free(map->keys);
  PyMem_Free(map->indices);
}

static int pointer_map_grow(pointer_map *map)
{
  size_t size = map->keys ? 2 * (map->mask + 1) : 256;
  pointer_map grown = {PyMem_Calloc(size, sizeof(PyObject *)),
                       PyMem_Calloc(size, sizeof(Py_ssize_t)), size - 1, map->count};
  if (grown.keys == NULL || grown.indices == NULL) {
    pointer_map_free(&grown);
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; map->keys != NULL && i <= map->mask; i++) {
    if (map->keys[i] == NULL) continue;
    size_t slot = ((uintptr_t)map->keys[i] >> 4) & grown.mask;
    while (grown.keys[slot] != NULL) slot = (slot + 1) & grown.mask;
    grown.keys[slot] = map->keys[i];
    grown.indices[slot] = map->indices[i];
  }
  pointer_map_free(map);
  *map = grown;
  return 0;
}

/* The index of `key`; *added says whether it is new. -1 when memory ran out. */
static Py_ssize_t pointer_map_index(pointer_map *map, PyObject *key, bool *added)
{
  if ((map->keys == NULL || (size_t)map->count * 2 > map->mask) && pointer_map_grow(map) < 0)
    return -1;
  size_t slot = ((uintptr_t)key >> 4) & map->mask;
  while (map->keys[slot] != NULL && map->keys[slot] != key) slot = (slot + 1) & map->mask;
  *added = map->keys[slot] == NULL;
  if (*added) {
    map->keys[slot] = key;
    map->indices[slot] = map->count++;
  }
  return map->indices[slot];
}

int fdp_entries_collect(fdp_tree *tree, int which, fdp_tree_entries *list)
{
  pointer_map map = {0};
  PyObject *distinct = PyList_New(0), *dict = NULL;
  int result = -1;
  if (distinct == NULL) goto done;
  list->count = 0;
  for (Py_ssize_t m = 0; m < tree->module_count; m++) {
    Py_ssize_t position = 0;
    PyObject *key, *tensor;
    Py_XSETREF(dict, fdp_tree_member_of(tree, m, which));
    if (dict == NULL) goto done;
    while (PyDict_Next(dict, &position, &key, &tensor)) {
      bool added = false;
      Py_ssize_t index = -1;
      if (tensor != Py_None) {
        index = pointer_map_index(&map, tensor, &added);
        if (index < 0 || (added && PyList_Append(distinct, tensor) < 0)) goto done;
      }
      if (entries_push(list, tensor == Py_None ? NULL : tensor, index) < 0) goto done;
    }
  }
  Py_XSETREF(list->tensors, PyList_AsTuple(distinct));
  if (list->tensors == NULL) goto done;
  result = 0;
done:
  pointer_map_free(&map);
  Py_XDECREF(distinct);
  Py_XDECREF(dict);
  return result;
}

/* Which of the distinct tensors stands in each entry, as bytes: what is tied to what. */
PyObject *fdp_entries_pattern(const fdp_tree *tree)
{
  Py_ssize_t count = tree->parameters.count + tree->buffers.count;
  PyObject *bytes = PyBytes_FromStringAndSize(NULL, (count + 1) * (Py_ssize_t)sizeof(int32_t));
  if (bytes == NULL) return NULL;
  char *at = PyBytes_AS_STRING(bytes);
  int32_t value = (int32_t)tree->parameters.count;
  memcpy(at, &value, sizeof value);
  for (Py_ssize_t i = 0; i < count; i++) {
    const fdp_tree_entry *entry = i < tree->parameters.count
                                      ? &tree->parameters.entries[i]
                                      : &tree->buffers.entries[i - tree->parameters.count];
    value = (int32_t)entry->index;
    memcpy(at + (i + 1) * (Py_ssize_t)sizeof value, &value, sizeof value);
  }
  return bytes;
}

PyObject *fdp_entries_indices(const fdp_tree_entries *list, Py_ssize_t *cursor, Py_ssize_t count)
{
  PyObject *indices = PyTuple_New(count);
  for (Py_ssize_t i = 0; indices != NULL && i < count; i++, ++*cursor) {
    PyObject *index = PyLong_FromSsize_t(list->entries[*cursor].index);
    if (index == NULL) Py_CLEAR(indices);
    else PyTuple_SET_ITEM(indices, i, index);
  }
  return indices;
}
