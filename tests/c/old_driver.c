/* Stands for a driver that is too old: all that the CUDA runtime asks of one before it gives up.
 * cuda_refusals.c says how it is used. */
int cuInit(unsigned int flags);
int cuDriverGetVersion(int *version);

int cuInit(unsigned int flags) {
  (void)flags;
  return 0;
}

int cuDriverGetVersion(int *version) {
  *version = 11040;
  return 0;
}
