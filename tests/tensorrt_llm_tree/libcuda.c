/* NVIDIA's driver of a machine with one H100, as far as `cog_triton.artifact.compatibility` asks it. */
#include <string.h>

int cuInit(unsigned flags) { return flags; }

int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}

/* 75 and 76 are the compute capability's major and minor number. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0;
  return device;
}

int cuDeviceGetName(char *name, int length, int device) {
  strncpy(name, "NVIDIA H100 80GB HBM3", length);
  return device;
}
