#include "py_views.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "bucket_slots.h"
#include "py_bucket.h"
#include "py_producer.h"

/* One block for all views of a call: the managed tensors that are handed out, their shapes and
 * strides. It and the buffer live until the last view has gone, on whichever thread that is, with
 * or without the GIL: hence malloc, the atomic count, and no Python here. */
typedef struct views_owner {
  atomic_int_least32_t users;
  DLManagedTensorVersioned *flat; /* the one owning reference to the buffer */
  int64_t *sizes;                 /* shapes and strides of all views, behind `items` */
  DLManagedTensorVersioned items[];
} views_owner;

static void owner_release(views_owner *owner, int32_t users) {
  if (atomic_fetch_sub_explicit(&owner->users, users, memory_order_acq_rel) != users) return;
  if (owner->flat->deleter != NULL) owner->flat->deleter(owner->flat);
  free(owner);
}

static void view_deleter(DLManagedTensorVersioned *item) { owner_release(item->manager_ctx, 1); }

/* The block for the slots of `plan` in `flat`, which it takes over; NULL with MemoryError, and
 * `flat` still the caller's. */
static views_owner *owner_make(const fdp_bucket *plan, DLManagedTensorVersioned *flat) {
  int32_t count = fdp_bucket_count(plan);
  char *data = (char *)flat->dl_tensor.data + flat->dl_tensor.byte_offset;
  size_t size_count = 0;
  views_owner *owner;
  int64_t *sizes;

  for (int32_t i = 0; i < count; i++)
    size_count += 2 * (size_t)fdp_bucket_slot(plan, i, data, (fdp_device_id){0}).ndim;
  owner = malloc(sizeof *owner + (size_t)count * sizeof owner->items[0] +
                 size_count * sizeof *owner->sizes);
  if (owner == NULL) {
    PyErr_NoMemory();
    return NULL;
  }
  atomic_init(&owner->users, count);
  owner->flat = flat;
  owner->sizes = sizes = (int64_t *)(owner->items + count);
  for (int32_t i = 0; i < count; i++) {
    fdp_view slot = fdp_bucket_slot(plan, i, data, (fdp_device_id){0});
    DLManagedTensorVersioned *item = &owner->items[i];
    size_t sizes_bytes = (size_t)slot.ndim * sizeof *sizes;

    *item = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = owner,
        .deleter = view_deleter,
        .dl_tensor = flat->dl_tensor,
    };
    item->dl_tensor.data = slot.data;
    item->dl_tensor.byte_offset = 0;
    item->dl_tensor.ndim = slot.ndim;
    item->dl_tensor.shape = memcpy(sizes, slot.shape, sizes_bytes);
    item->dl_tensor.strides = memcpy(sizes + slot.ndim, slot.strides, sizes_bytes);
    sizes += 2 * slot.ndim;
  }
  return owner;
}

/* Turns the items into tensors: a tuple; or None when the table makes another type than that of the
 * buffer; or NULL with an error set. */
static PyObject *make_tensors(const DLPackExchangeAPI *table, views_owner *owner, int32_t count,
                              PyTypeObject *type) {
  PyObject *tensors = PyTuple_New(count);
  int32_t made = 0;

  if (tensors == NULL) goto failed;
  while (made < count) {
    void *tensor = NULL;
    int failed = table->managed_tensor_to_py_object_no_sync(&owner->items[made], &tensor);

    /* Who frees the item after a failure is not written: the item counts as handed out, and so
     * rather leaks the buffer than frees it twice. */
    made++;
    if (failed) goto failed;
    PyTuple_SET_ITEM(tensors, made - 1, (PyObject *)tensor);
    if (Py_TYPE((PyObject *)tensor) != type) {
      Py_SETREF(tensors, Py_NewRef(Py_None));
      goto done;
    }
  }
  return tensors;
failed:
  Py_CLEAR(tensors);
done:
  if (made < count) owner_release(owner, count - made);
  return tensors;
}

PyObject *fdp_py_bucket_views(PyObject *self, PyObject *flat) {
  fdp_py_bucket *bucket = (fdp_py_bucket *)self;
  int32_t count = fdp_bucket_count(bucket->plan);
  DLManagedTensorVersioned *managed = NULL;
  views_owner *owner = NULL;
  fdp_py_producer producer;
  fdp_py_borrower borrower;
  PyObject *result = NULL;
  fdp_view view;

  fdp_py_borrower_open(&borrower, fdp_py_state_of(self));
  if (fdp_py_bucket_borrow_flat(bucket, &borrower, flat, "bucket views", &view) < 0) goto done;
  if (fdp_py_producer_find(borrower.state, Py_TYPE(flat), &producer) < 0) goto done;
  if (view.device.kind == FDP_DEVICE_CUDA || producer.table == NULL ||
      producer.table->managed_tensor_from_py_object_no_sync == NULL ||
      producer.table->managed_tensor_to_py_object_no_sync == NULL) {
    result = Py_NewRef(Py_None);
    goto done;
  }
  if (producer.table->managed_tensor_from_py_object_no_sync(flat, &managed) != 0) goto done;
  owner = owner_make(bucket->plan, managed);
  if (owner == NULL) {
    if (managed->deleter != NULL) managed->deleter(managed);
    goto done;
  }
  result = make_tensors(producer.table, owner, count, Py_TYPE(flat));
done:
  fdp_py_borrower_close(&borrower);
  return result;
}
