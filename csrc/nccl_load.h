/* Finds NCCL and fills the table of its functions. In this order: what FASTDP_NCCL names, and then
 * nothing else; the copy that the process has loaded already (torch's); the wheels beside a loaded
 * libtorch; the system's. Nothing of NCCL is run but the question for its version. A library once
 * loaded is never closed. Any thread; no streams. */
#ifndef FDP_NCCL_LOAD_H
#define FDP_NCCL_LOAD_H

#include "nccl.h"
#include "status.h"

typedef struct fdp_nccl_library {
  fdp_nccl table;
  int version;
  char path[400]; /* of the file that was loaded */
} fdp_nccl_library;

/* FDP_UNSUPPORTED, saying what was tried and what was wrong with each, if there is none that can be
 * used. */
fdp_status fdp_nccl_load(fdp_nccl_library *library);
/* "2.30.7"; writes at most `size_bytes` and returns `text`. */
const char *fdp_nccl_version_text(int version, char *text, size_t size_bytes);

#endif
