/* The structs of DLPack 1.3 (Apache-2.0, https://github.com/dmlc/dlpack), only those that are used
 * here, under their own names since they are an ABI: memory layout and call contracts shared with
 * other libraries. A DLTensor owns nothing. A managed tensor is owned by whoever holds it, and is
 * given back by calling its deleter once, on any thread. Nothing here touches a stream. */
#ifndef FDP_DLPACK_H
#define FDP_DLPACK_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define DLPACK_MAJOR_VERSION 1
#define DLPACK_MINOR_VERSION 3

/* Bits of DLManagedTensorVersioned.flags. */
#define DLPACK_FLAG_BITMASK_READ_ONLY (UINT64_C(1) << 0)
#define DLPACK_FLAG_BITMASK_IS_COPIED (UINT64_C(1) << 1)
#define DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED (UINT64_C(1) << 2)

typedef struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;

typedef struct DLDevice {
  int32_t device_type; /* fdp_device_kind has the ones that the core takes */
  int32_t device_id;
} DLDevice;

typedef struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
  void *data; /* element (0, ..., 0) is at data + byte_offset */
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements; NULL, from producers before 1.2, means row-major */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *self); /* may be NULL */
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self); /* may be NULL */
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader *prev_api; /* a table of an older major, or NULL */
} DLPackExchangeAPIHeader;

/* Each returns 0, or -1 with a Python error set (the allocator: with SetError called). All but the
 * allocator need the calling thread to be attached to Python. Any entry may be NULL in the wild. */
typedef struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor *prototype, DLManagedTensorVersioned **out,
                                  void *error_ctx,
                                  void (*SetError)(void *error_ctx, const char *kind,
                                                   const char *message));
  int (*managed_tensor_from_py_object_no_sync)(void *py_object, DLManagedTensorVersioned **out);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *tensor,
                                             void **out_py_object); /* takes over `tensor` */
  int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out); /* borrowed */
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} DLPackExchangeAPI;

static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, device) == 8, "DLTensor");
static_assert(offsetof(DLTensor, ndim) == 16 && offsetof(DLTensor, dtype) == 20, "DLTensor");
static_assert(offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32, "DLTensor");
static_assert(offsetof(DLTensor, byte_offset) == 40, "DLTensor");
static_assert(sizeof(DLManagedTensor) == 64, "DLManagedTensor");
static_assert(offsetof(DLManagedTensor, manager_ctx) == 48, "DLManagedTensor");
static_assert(sizeof(DLManagedTensorVersioned) == 80, "DLManagedTensorVersioned");
static_assert(offsetof(DLManagedTensorVersioned, flags) == 24, "DLManagedTensorVersioned");
static_assert(offsetof(DLManagedTensorVersioned, dl_tensor) == 32, "DLManagedTensorVersioned");
static_assert(sizeof(DLPackExchangeAPIHeader) == 16, "DLPackExchangeAPIHeader");
static_assert(sizeof(DLPackExchangeAPI) == 56, "DLPackExchangeAPI");
static_assert(offsetof(DLPackExchangeAPI, managed_tensor_allocator) == 16, "DLPackExchangeAPI");
static_assert(offsetof(DLPackExchangeAPI, current_work_stream) == 48, "DLPackExchangeAPI");

#endif
