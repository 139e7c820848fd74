/* An NCCL for tests, in a shared library that fastdp loads as it would load the real one. It works
 * over any backend of device.h: a group becomes copies, events and waits on the ranks' streams,
 * with no more order between the streams than NCCL promises. It checks what NCCL would hang on, and
 * fails or hangs on demand. The library exports `fake_nccl`, this table; tests get it by dlsym. */
#ifndef FDP_TEST_FAKE_NCCL_H
#define FDP_TEST_FAKE_NCCL_H

#include "../../csrc/device.h"

typedef struct fake_nccl_counts {
  int made;       /* communicators that init made */
  int destroyed;
  int aborted;
  int broadcasts; /* one for each rank; what connecting does is counted too */
  int reduces;
  int sends;
  int violations;      /* what would hang or corrupt with NCCL */
  char violation[200]; /* the first */
  int least_ctas;      /* smallest max_ctas of a config, 0 if none was given */
} fake_nccl_counts;

/* `set` stands for the communicators that were made together. Without streams: the rank's has
 * ended. */
typedef void fake_nccl_watch(fdp_device *device, fdp_stream *const *streams, int32_t stream_count,
                             const void *set, bool ends);

typedef struct fake_nccl_table {
  /* As new: version 2.30.7. Waits until every hung call has returned. No work of a group may be
   * waiting to run. */
  void (*reset)(void);
  fake_nccl_counts (*read)(void);
  void (*set_version)(int version);
  /* The nth call from now (1 = the next) of the function returns `result`; 0 for nth: none. */
  void (*fail)(const char *call, int nth, int result);
  /* Every call of the function hangs until release, or until a communicator is aborted. */
  void (*hang)(const char *call);
  void (*release)(void);
  /* ncclCommGetAsyncError says so for this rank of every communicator made so far. */
  void (*fail_rank)(int rank, int result);
  /* The calling thread's current device, for init. */
  void (*set_current)(fdp_device *device);
  /* Groups that the calling thread has open. */
  int (*depth)(void);
  void (*violate)(const char *text);
  /* Called around what the library does to devices. */
  void (*set_spare)(void (*spare)(bool is_on));
  /* Called before and after what a group does on the streams of a rank; NULL: nobody looks. */
  void (*set_watch)(fake_nccl_watch *watch);
} fake_nccl_table;

#endif
