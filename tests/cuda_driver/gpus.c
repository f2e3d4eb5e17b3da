/* NVIDIA's driver as its libraries tell of it: libcuda.so.1 and libnvidia-ml.so.1 in one, with GPUs by
 * the environment: FAKE_GPU_NAME, FAKE_GPU_SM (90), FAKE_GPU_MIB, FAKE_GPU_FREE_MIB, FAKE_GPU_COUNT,
 * FAKE_DRIVER (580.95.05), FAKE_CUDA (13000) and FAKE_CUINIT, what cuInit answers.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *text(const char *name, const char *otherwise) {
  const char *found = getenv(name);
  return found ? found : otherwise;
}

static long long number(const char *name, long long otherwise) {
  const char *found = getenv(name);
  return found ? atoll(found) : otherwise;
}

static long long total(void) { return number("FAKE_GPU_MIB", 81559) << 20; }

int cuInit(unsigned flags) { return (int)flags + (int)number("FAKE_CUINIT", 0); }

int cuDriverGetVersion(int *version) {
  *version = (int)number("FAKE_CUDA", 13000);
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = (int)number("FAKE_GPU_COUNT", 1);
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int sm = (int)number("FAKE_GPU_SM", 90);
  *value = attribute == 75 ? sm / 10 : sm % 10;
  return device < 0;
}

int cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, "%s", text("FAKE_GPU_NAME", "NVIDIA H100 80GB HBM3"));
  return device < 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = total();
  return device < 0;
}

int cuDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", device);
  return 0;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  snprintf(version, length, "%s", text("FAKE_DRIVER", "580.95.05"));
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)number("FAKE_GPU_COUNT", 1);
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  *handle = (void *)1;
  return strncmp(id, "0000:", 5) != 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long memory[3]) {
  memory[0] = total();
  memory[1] = number("FAKE_GPU_FREE_MIB", total() >> 20) << 20;
  memory[2] = memory[0] - memory[1];
  return handle == NULL;
}
