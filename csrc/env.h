/* Every environment variable that fastdp reads, in one table. Readers look at the environment at
 * each call and keep nothing; they may be called by any thread as long as nobody writes the
 * environment meanwhile. No streams. */
#ifndef FDP_ENV_H
#define FDP_ENV_H

#include <stdint.h>

#include "status.h"

typedef enum fdp_env_id {
  FDP_ENV_LOG,
  FDP_ENV_TIMEOUT_MS,
  FDP_ENV_BUCKET_BYTES,
  FDP_ENV_TRANSPORT,
  FDP_ENV_OVERLAP,
  FDP_ENV_UNUSED_GRAD,
  FDP_ENV_ENGINE,
  FDP_ENV_DUMP,
  FDP_ENV_NCCL,
  FDP_ENV_TEST_BAD_PEER,
  FDP_ENV_CUDA,
  FDP_ENV_CUDA_ARCHS,
  FDP_ENV_SANITIZE,
  FDP_ENV_COUNT
} fdp_env_id;

typedef enum fdp_env_type { FDP_ENV_CHOICE, FDP_ENV_INTEGER, FDP_ENV_TEXT } fdp_env_type;

typedef struct fdp_env_variable {
  const char *name;
  fdp_env_type type;
  const char *type_text; /* for people: "integer, ms", "off|error|..." */
  const char *standard;  /* the value when it is not set */
  int64_t minimum;       /* integers */
  int64_t maximum;
  const char *sentence;
} fdp_env_variable;

const fdp_env_variable *fdp_env_describe(fdp_env_id id);

/* An unset or empty variable is its default. Anything that does not parse is refused by name, with
 * the value and what is allowed. */
fdp_status fdp_env_integer(fdp_env_id id, int64_t *value);
/* The place of the value among the choices of type_text, from 0. */
fdp_status fdp_env_choice(fdp_env_id id, int32_t *choice);
/* The text itself. */
const char *fdp_env_text(fdp_env_id id);
/* The choice at that place; "" when there is none. */
const char *fdp_env_choice_name(fdp_env_id id, int32_t choice);

#endif
