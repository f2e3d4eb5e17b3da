/* NVIDIA's driver 580 as far as checkpoints of processes go, on one GPU of 80 GB.
 *
 * Beside the library lies a directory `state`: a file for each process with CUDA, of its state and its
 * bytes on the GPU; `calls`, a line for each checkpoint call; and `faults`, with lines of a call, a
 * process ("0" for any) and the error that it gets ("hang" for none, ever).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <dirent.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ILLEGAL_STATE = 401 };
#define TOTAL 85899345920LL
#define POLL_US 2000

/* Only where Python is can the library be loaded: tritonserver would want more of a driver. */
extern int Py_IsInitialized(void);
int (*needs_python)(void) = Py_IsInitialized;

typedef struct { unsigned timeout_ms, reserved0; unsigned long long reserved1[7]; } LockArguments;
typedef struct { int state; long long bytes; } Process;

static const char *place(const char *name) {
  static __thread char path[4096];
  Dl_info info;
  dladdr((void *)place, &info);
  snprintf(path, sizeof path, "%s", info.dli_fname);
  snprintf(strrchr(path, '/') + 1, 512, "state/%s", name);
  return path;
}

static int exclusively(void) {
  int lock = open(place("lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  flock(lock, LOCK_EX);
  return lock;
}

static int get(int pid, Process *found) {
  char name[32];
  snprintf(name, sizeof name, "%d", pid);
  FILE *file = fopen(place(name), "r");
  if (!file) return 0;
  int read = fscanf(file, "%d %lld", &found->state, &found->bytes);
  fclose(file);
  return read == 2 && (kill(pid, 0) == 0 || errno == EPERM);
}

static void put(int pid, Process process) {
  char name[32], next[48], from[4096];
  snprintf(name, sizeof name, "%d", pid);
  snprintf(next, sizeof next, "%d.next", pid);
  snprintf(from, sizeof from, "%s", place(next));
  FILE *file = fopen(from, "w");
  fprintf(file, "%d %lld\n", process.state, process.bytes);
  fclose(file);
  rename(from, place(name));
}

static long long used(void) {
  long long sum = 0;
  DIR *directory = opendir(place("."));
  for (struct dirent *entry; (entry = readdir(directory));) {
    char *end;
    int pid = strtol(entry->d_name, &end, 10);
    Process process;
    if (!*end && pid && get(pid, &process) && process.state < CHECKPOINTED) sum += process.bytes;
  }
  closedir(directory);
  return sum;
}

int cuDriverGetVersion(int *version) {
  *version = API;
  return SUCCESS;
}

/* A context: from now on the process has CUDA. */
int cuDevicePrimaryCtxRetain(void **context, int device) {
  int lock = exclusively();
  Process process;
  if (!get(getpid(), &process)) put(getpid(), (Process){RUNNING, 0});
  close(lock);
  *context = (void *)1;
  return device;
}

/* As every call that touches the GPU, it waits while the process is locked. */
int cuCtxSynchronize(void) {
  Process process = {RUNNING, 0};
  while (get(getpid(), &process) && process.state != RUNNING) usleep(POLL_US);
  return SUCCESS;
}

int cuMemGetInfo_v2(size_t *unused, size_t *total) {
  cuCtxSynchronize();
  *total = TOTAL;
  *unused = TOTAL - used();
  return SUCCESS;
}

/* Bytes that this process has on the GPU from now on; not in NVIDIA's driver, where they are summed up
 * from its allocations. */
int doubleHold(long long bytes) {
  cuCtxSynchronize();
  int lock = exclusively(), code = OUT_OF_MEMORY;
  Process process;
  if (!get(getpid(), &process)) code = INVALID_VALUE;
  else if (used() - process.bytes + bytes <= TOTAL) {
    put(getpid(), (Process){RUNNING, bytes});
    code = SUCCESS;
  }
  close(lock);
  return code;
}

#if API >= 12080
static int fault(const char *call, int pid) {
  FILE *file = fopen(place("calls"), "a");
  fprintf(file, "%s %d\n", call, pid);
  fclose(file);
  if (!(file = fopen(place("faults"), "r"))) return SUCCESS;
  char name[32], error[32];
  int of, code = SUCCESS;
  while (!code && fscanf(file, "%31s %d %31s", name, &of, error) == 3)
    if (!strcmp(name, call) && (!of || of == pid)) {
      if (!strcmp(error, "hang")) pause();
      code = atoi(error);
    }
  fclose(file);
  return code;
}

static int change(const char *call, int pid, int from, int to) {
  int code = fault(call, pid), lock = exclusively();
  Process process;
  if (!get(pid, &process)) code = INVALID_VALUE;
  else if (!code && process.state != from) code = ILLEGAL_STATE;
  else if (!code && to == LOCKED && from == CHECKPOINTED && used() + process.bytes > TOTAL)
    code = OUT_OF_MEMORY;
  else if (!code) put(pid, (Process){to, process.bytes});
  else if (code == 999) put(pid, (Process){FAILED, process.bytes});
  close(lock);
  return code;
}

int cuCheckpointProcessGetState(int pid, int *state) {
  Process process;
  if (!get(pid, &process)) return INVALID_VALUE;
  *state = process.state;
  return SUCCESS;
}

int cuCheckpointProcessLock(int pid, LockArguments *arguments) {
  if (arguments) {
    if (arguments->reserved0) return INVALID_VALUE;
    for (int i = 0; i < 7; i++) if (arguments->reserved1[i]) return INVALID_VALUE;
  }
  return change("lock", pid, RUNNING, LOCKED);
}

int cuCheckpointProcessCheckpoint(int pid, void *arguments) {
  return arguments ? INVALID_VALUE : change("checkpoint", pid, LOCKED, CHECKPOINTED);
}

int cuCheckpointProcessRestore(int pid, void *arguments) {
  return arguments ? INVALID_VALUE : change("restore", pid, CHECKPOINTED, LOCKED);
}

int cuCheckpointProcessUnlock(int pid, void *arguments) {
  return arguments ? INVALID_VALUE : change("unlock", pid, LOCKED, RUNNING);
}
#endif
