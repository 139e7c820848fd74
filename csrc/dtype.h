/* Element types by DLPack's numbers (code, bits, lanes), so that nothing is translated at the seam.
 * Pure: no state, any thread, no streams. A dtype the core does not know can still be moved, as
 * bytes; only sums need to know it. */
#ifndef FDP_DTYPE_H
#define FDP_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum fdp_dtype_code {
  FDP_CODE_INT = 0,
  FDP_CODE_UINT = 1,
  FDP_CODE_FLOAT = 2,
  FDP_CODE_BFLOAT = 4,
  FDP_CODE_COMPLEX = 5,
  FDP_CODE_BOOL = 6
} fdp_dtype_code;

typedef struct fdp_dtype {
  uint8_t code;   /* fdp_dtype_code, or a DLPack code the core only moves */
  uint8_t bits;   /* of one lane */
  uint16_t lanes; /* 1 for all that can be summed */
} fdp_dtype;

/* Bytes of one element, lanes included; 0 if it does not fill whole bytes. */
size_t fdp_dtype_bytes(fdp_dtype dtype);
bool fdp_dtype_equal(fdp_dtype a, fdp_dtype b);
/* True if fdp_*_sum knows it: fp64, fp32, fp16, bf16, complex128, complex64, complex32, (u)int8-64,
 * bool. */
bool fdp_dtype_can_sum(fdp_dtype dtype);
/* "float32", "bfloat16", "int8", "bool", ...; unknown ones as "dtype(code,bits,lanes)". Writes at
 * most `size_bytes` bytes and returns `text`. */
const char *fdp_dtype_name(fdp_dtype dtype, char *text, size_t size_bytes);

#endif
