#include "dtype.h"

#include <stdio.h>

size_t fdp_dtype_bytes(fdp_dtype dtype) {
  size_t bits = (size_t)dtype.bits * dtype.lanes;
  return bits % 8 == 0 ? bits / 8 : 0;
}

bool fdp_dtype_equal(fdp_dtype a, fdp_dtype b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

bool fdp_dtype_can_sum(fdp_dtype dtype) {
  if (dtype.lanes != 1) return false;
  switch (dtype.code) {
    case FDP_CODE_INT:
    case FDP_CODE_UINT:
      return dtype.bits == 8 || dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64;
    case FDP_CODE_FLOAT: return dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64;
    case FDP_CODE_BFLOAT: return dtype.bits == 16;
    case FDP_CODE_COMPLEX: return dtype.bits == 32 || dtype.bits == 64 || dtype.bits == 128;
    case FDP_CODE_BOOL: return dtype.bits == 8;
    default: return false;
  }
}

const char *fdp_dtype_name(fdp_dtype dtype, char *text, size_t size_bytes) {
  static const char *const prefixes[] = {
      [FDP_CODE_INT] = "int",       [FDP_CODE_UINT] = "uint",       [FDP_CODE_FLOAT] = "float",
      [FDP_CODE_BFLOAT] = "bfloat", [FDP_CODE_COMPLEX] = "complex",
  };
  if (!fdp_dtype_can_sum(dtype)) {
    snprintf(text, size_bytes, "dtype(%u,%u,%u)", dtype.code, dtype.bits, dtype.lanes);
  } else if (dtype.code == FDP_CODE_BOOL) {
    snprintf(text, size_bytes, "bool");
  } else {
    snprintf(text, size_bytes, "%s%u", prefixes[dtype.code], dtype.bits);
  }
  return text;
}
