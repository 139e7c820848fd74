#include "env.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"

#define TEXT_OF(number) #number
#define VALUE_TEXT(number) TEXT_OF(number)

static const fdp_env_variable variables[FDP_ENV_COUNT] = {
    [FDP_ENV_LOG] = {"FASTDP_LOG", FDP_ENV_CHOICE, "off|error|warning|info|debug", "warning",
                     0, 0, "Which messages go to the log."},
    [FDP_ENV_TIMEOUT_MS] = {"FASTDP_TIMEOUT_MS", FDP_ENV_INTEGER, "integer, ms",
                            VALUE_TEXT(FDP_DEFAULT_TIMEOUT_MS), 1, INT64_C(86400000),
                            "How long a wait on the host may last before it fails."},
    [FDP_ENV_BUCKET_BYTES] = {"FASTDP_BUCKET_BYTES", FDP_ENV_INTEGER, "integer, bytes", "26214400",
                              1, INT64_MAX,
                              "Size up to which parameters are put into one bucket."},
    [FDP_ENV_TRANSPORT] = {"FASTDP_TRANSPORT", FDP_ENV_CHOICE, "auto|local|peer|nccl|host", "auto",
                           0, 0,
                           "How data moves between GPUs: the first means that fits, or only this."},
    [FDP_ENV_OVERLAP] = {"FASTDP_OVERLAP", FDP_ENV_CHOICE, "auto|always|never", "auto", 0, 0,
                         "Hide moves of parameters behind compute: if they take long, or not."},
    [FDP_ENV_UNUSED_GRAD] = {"FASTDP_UNUSED_GRAD", FDP_ENV_CHOICE, "zero|none", "zero", 0, 0,
                             "The gradient of a parameter that no replica used."},
    [FDP_ENV_ENGINE] = {"FASTDP_ENGINE", FDP_ENV_CHOICE, "eager|auto|graph", "eager", 0, 0,
                        "What runs a step: Python, the faster of it and CUDA graphs, or graphs."},
    [FDP_ENV_DUMP] = {"FASTDP_DUMP", FDP_ENV_CHOICE, "off|error|signal|both", "off", 0, 0,
                      "When the last operations are told: in errors of the core, at SIGUSR1."},
    [FDP_ENV_NCCL] = {"FASTDP_NCCL", FDP_ENV_TEXT, "path of libnccl.so.2", "auto", 0, 0,
                      "The NCCL to use; auto: the one torch loaded, then torch's, then any."},
    [FDP_ENV_TEST_BAD_PEER] = {"FASTDP_TEST_BAD_PEER", FDP_ENV_TEXT, "two GPUs, as 0-1", "none",
                               0, 0, "For tests: peer copies of these two count as wrong."},
    [FDP_ENV_CUDA] = {"FASTDP_CUDA", FDP_ENV_TEXT, "auto|1|0", "auto", 0, 0,
                      "Build the CUDA backend: if nvcc is found, always, or never."},
    [FDP_ENV_CUDA_ARCHS] = {"FASTDP_CUDA_ARCHS", FDP_ENV_TEXT,
                            "list of numbers|native|all-major|all", "all", 0, 0,
                            "Architectures of the kernels; all: from 75 up, as far as nvcc knows."},
    [FDP_ENV_SANITIZE] = {"FASTDP_SANITIZE", FDP_ENV_TEXT, "list of address|undefined|thread",
                          "none", 0, 0, "Sanitizers to build with, for tests."},
};

static const char *names_choice[FDP_ENV_COUNT][5] = {
    [FDP_ENV_LOG] = {"off", "error", "warning", "info", "debug"},
    [FDP_ENV_TRANSPORT] = {"auto", "local", "peer", "nccl", "host"},
    [FDP_ENV_OVERLAP] = {"auto", "always", "never"},
    [FDP_ENV_UNUSED_GRAD] = {"zero", "none"},
    [FDP_ENV_ENGINE] = {"eager", "auto", "graph"},
    [FDP_ENV_DUMP] = {"off", "error", "signal", "both"},
};

const fdp_env_variable *fdp_env_describe(fdp_env_id id) {
  assert((int)id >= 0 && id < FDP_ENV_COUNT);
  return &variables[id];
}

static const char *value_text(fdp_env_id id) {
  const char *text = getenv(variables[id].name);
  return text && *text ? text : variables[id].standard;
}

const char *fdp_env_text(fdp_env_id id) {
  assert(fdp_env_describe(id)->type == FDP_ENV_TEXT);
  return value_text(id);
}

fdp_status fdp_env_integer(fdp_env_id id, int64_t *value) {
  const fdp_env_variable *variable = fdp_env_describe(id);
  assert(variable->type == FDP_ENV_INTEGER);
  const char *text = value_text(id);
  char *end = NULL;
  errno = 0;
  long long number = strtoll(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || number < variable->minimum ||
      number > variable->maximum) {
    return fdp_fail(FDP_INVALID_ARGUMENT, "%s is \"%.100s\": must be an integer from %" PRId64
                    " to %" PRId64, variable->name, text, variable->minimum, variable->maximum);
  }
  *value = number;
  return FDP_OK;
}

const char *fdp_env_choice_name(fdp_env_id id, int32_t choice) {
  assert(fdp_env_describe(id)->type == FDP_ENV_CHOICE);
  if (choice < 0 || choice >= 5 || !names_choice[id][choice]) return "";
  return names_choice[id][choice];
}

fdp_status fdp_env_choice(fdp_env_id id, int32_t *choice) {
  const fdp_env_variable *variable = fdp_env_describe(id);
  const char *text = value_text(id);
  for (int32_t i = 0; *fdp_env_choice_name(id, i) != '\0'; ++i) {
    if (strcmp(text, fdp_env_choice_name(id, i)) == 0) {
      *choice = i;
      return FDP_OK;
    }
  }
  return fdp_fail(FDP_INVALID_ARGUMENT, "%s is \"%.100s\": must be one of %s", variable->name, text,
                  variable->type_text);
}
