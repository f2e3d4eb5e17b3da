/* Wall clock that can be set for one server's processes alone (LD_PRELOAD).
 *
 * The file named by FAULT_CLOCK holds the seconds, a 64-bit integer, by which CLOCK_REALTIME is
 * ahead. Waits until a time of that clock end when the kernel's own has got there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define A_BILLION 1000000000 /* seconds: since boot it is less, since 1970 more */

static const volatile int64_t *ahead;

__attribute__((constructor)) static void open_clock(void) {
  const char *path = getenv("FAULT_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0)
    return;
  void *page = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
  ahead = page == MAP_FAILED ? NULL : page;
  close(file);
}

static int64_t jump(void) { return ahead ? *ahead : 0; }

static struct timespec of_kernel(const struct timespec *until) {
  struct timespec moved = *until;
  if (moved.tv_sec > A_BILLION)
    moved.tv_sec -= jump();
  return moved;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += jump();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out)
    *out = now.tv_sec;
  return now.tv_sec;
}

#define WAIT(name, object)                                                                         \
  int name(object, const struct timespec *until) {                                                 \
    static int (*real)(void *, const struct timespec *);                                           \
    struct timespec moved = of_kernel(until);                                                      \
    if (!real)                                                                                     \
      real = (int (*)(void *, const struct timespec *))dlsym(RTLD_NEXT, #name);                    \
    return real(it, &moved);                                                                       \
  }

WAIT(sem_timedwait, sem_t *restrict it)
WAIT(pthread_mutex_timedlock, pthread_mutex_t *restrict it)

int pthread_cond_timedwait(pthread_cond_t *restrict it, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  struct timespec moved = of_kernel(until);
  if (!real)
    real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(
        RTLD_NEXT, "pthread_cond_timedwait");
  return real(it, mutex, &moved);
}
