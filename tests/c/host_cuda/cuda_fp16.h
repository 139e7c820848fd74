/* fp16 on the host, for cuda_runtime.h beside it: exact, and rounded to nearest even. */
#ifndef FDP_HOST_CUDA_FP16_H
#define FDP_HOST_CUDA_FP16_H

#include <math.h>

#include "cuda_runtime.h"

struct __half { uint16_t bits; };
struct __half2 { __half x, y; };

static inline float __half2float(__half a) {
  int exponent = a.bits >> 10 & 31, mantissa = a.bits & 1023;
  float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent    ? ldexpf((float)(mantissa + 1024), exponent - 25)
                             : ldexpf((float)mantissa, -24);
  return a.bits >> 15 ? -size : size;
}

static inline __half __float2half_rn(float a) {
  int sign = signbit(a) ? 0x8000 : 0, exponent;
  float size = fabsf(a);
  if (size != size) return __half{0x7fff};
  if (size >= 65520) return __half{(uint16_t)(sign | 0x7c00)};
  frexpf(size, &exponent);
  if (exponent < -13 || size == 0) exponent = -13; /* as denormals have */
  /* 1024 units to a power of two, so that what is rounded up to the next one carries over. */
  int units = (int)nearbyintf(ldexpf(size, 11 - exponent));
  return __half{(uint16_t)(sign | (((exponent + 13) << 10) + units))};
}

static inline float2 __half22float2(__half2 a) {
  return float2{__half2float(a.x), __half2float(a.y)};
}

static inline __half2 __float22half2_rn(float2 a) {
  return __half2{__float2half_rn(a.x), __float2half_rn(a.y)};
}

#endif
