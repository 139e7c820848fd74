#include "nccl_load.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "env.h"
#include "limits.h"
#include "log.h"

#define SONAME "libnccl.so.2"

/* What was tried so far, for the message of a failure. */
typedef struct load_tries {
  char text[FDP_MESSAGE_BYTES - 160];
  size_t used;
} load_tries;

const char *fdp_nccl_version_text(int version, char *text, size_t size_bytes) {
  int unit = version < 10000 ? 1000 : 10000; /* 2804 was 2.8.4, until 2.9 */
  snprintf(text, size_bytes, "%d.%d.%d", version / unit, version % unit / 100, version % 100);
  return text;
}

static void note(load_tries *tries, const char *where, const char *what) {
  int written = snprintf(tries->text + tries->used, sizeof tries->text - tries->used, "%s%s: %s",
                         tries->used ? "; " : "", where, what);
  if (written > 0) tries->used += (size_t)written;
  if (tries->used >= sizeof tries->text) tries->used = sizeof tries->text - 1;
}

/* C has no cast from an object's address to a function's; POSIX promises that they are alike. */
static bool find(void *handle, const char *name, void *function, const char **missing) {
  void *found = dlsym(handle, name);
  memcpy(function, &found, sizeof found);
  if (!found) *missing = name;
  return found != NULL;
}

/* Returns the name of a function that is not there, or NULL. */
static const char *fill(void *handle, fdp_nccl *table) {
  const char *missing = NULL, *optional = NULL;
  (void)(find(handle, "ncclGetVersion", &table->get_version, &missing) &&
         find(handle, "ncclGetErrorString", &table->get_error_string, &missing) &&
         find(handle, "ncclGetUniqueId", &table->get_unique_id, &missing) &&
         find(handle, "ncclCommDestroy", &table->comm_destroy, &missing) &&
         find(handle, "ncclCommAbort", &table->comm_abort, &missing) &&
         find(handle, "ncclCommGetAsyncError", &table->comm_get_async_error, &missing) &&
         find(handle, "ncclGroupStart", &table->group_start, &missing) &&
         find(handle, "ncclGroupEnd", &table->group_end, &missing) &&
         find(handle, "ncclBroadcast", &table->broadcast, &missing) &&
         find(handle, "ncclReduce", &table->reduce, &missing) &&
         find(handle, "ncclSend", &table->send, &missing) &&
         find(handle, "ncclRecv", &table->recv, &missing) &&
         find(handle, "ncclCommInitRankConfig", &table->comm_init_rank_config, &missing));
  (void)find(handle, "ncclGetLastError", &table->get_last_error, &optional);
  return missing;
}

static void find_path(void *handle, char *path, size_t path_bytes) {
  struct link_map *map = NULL;
  path[0] = '\0';
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name) {
    snprintf(path, path_bytes, "%s", map->l_name);
  }
}

/* The version is asked for before a missing function is complained of: it says more. */
static bool take(void *handle, const char *where, fdp_nccl_library *library, load_tries *tries) {
  char text[200], version[32];
  const char *missing = fill(handle, &library->table);
  int result = library->table.get_version ? library->table.get_version(&library->version) : 0;
  if (result != FDP_NCCL_SUCCESS || !library->table.get_version) {
    note(tries, where, "does not tell its version");
    return false;
  }
  fdp_nccl_version_text(library->version, version, sizeof version);
  if (library->version < FDP_NCCL_OLDEST) {
    snprintf(text, sizeof text, "is NCCL %s, must be 2.17 or newer", version);
    note(tries, where, text);
    return false;
  }
  if (missing) {
    snprintf(text, sizeof text, "NCCL %s without %s", version, missing);
    note(tries, where, text);
    return false;
  }
  find_path(handle, library->path, sizeof library->path);
  fdp_log(FDP_LOG_INFO, "NCCL %s from %s", version, library->path);
  return true;
}

/* RTLD_LOCAL, and found by our own handle only: two copies of NCCL in a process must not see each
 * other's symbols. */
static bool try_file(const char *file, const char *where, int flags, fdp_nccl_library *library,
                     load_tries *tries) {
  void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | flags);
  if (handle) return take(handle, where, library, tries);
  const char *reason = dlerror();
  note(tries, where, flags & RTLD_NOLOAD ? "none" : reason ? reason : "cannot be loaded");
  return false;
}

/* --- the wheels beside torch --- */

typedef struct torch_folder {
  char path[300]; /* .../torch/lib/ */
} torch_folder;

static int look_for_torch(struct dl_phdr_info *info, size_t size_bytes, void *found) {
  torch_folder *folder = found;
  (void)size_bytes;
  const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
  if (!name || strncmp(name, "/libtorch", strlen("/libtorch")) != 0) return 0;
  size_t length = (size_t)(name + 1 - info->dlpi_name);
  if (length >= sizeof folder->path) return 0;
  memcpy(folder->path, info->dlpi_name, length);
  folder->path[length] = '\0';
  return 1;
}

static bool try_wheels(fdp_nccl_library *library, load_tries *tries) {
  static const char *const places[] = {"", "../../nvidia/nccl/lib/", "../../nvidia/cu13/lib/",
                                       "../../nvidia/cu12/lib/"};
  torch_folder folder;
  if (!dl_iterate_phdr(look_for_torch, &folder)) {
    note(tries, "beside torch", "no libtorch is loaded");
    return false;
  }
  for (size_t i = 0; i < sizeof places / sizeof places[0]; ++i) {
    char file[400];
    snprintf(file, sizeof file, "%s%s%s", folder.path, places[i], SONAME);
    if (try_file(file, file, 0, library, tries)) return true;
  }
  return false;
}

fdp_status fdp_nccl_load(fdp_nccl_library *library) {
  load_tries tries = {.used = 0};
  const char *named = fdp_env_text(FDP_ENV_NCCL);
  *library = (fdp_nccl_library){.version = 0};
  if (strcmp(named, "auto") != 0) {
    if (try_file(named, "FASTDP_NCCL", 0, library, &tries)) return FDP_OK;
    return fdp_fail(FDP_UNSUPPORTED, "NCCL cannot be used: %s", tries.text);
  }
  if (try_file(SONAME, "loaded already", RTLD_NOLOAD, library, &tries)) return FDP_OK;
  if (try_wheels(library, &tries)) return FDP_OK;
  if (try_file(SONAME, "the system's", 0, library, &tries)) return FDP_OK;
  return fdp_fail(FDP_UNSUPPORTED, "no NCCL can be used (FASTDP_NCCL may name one): %s",
                  tries.text);
}
