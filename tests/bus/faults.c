/* Preloaded into a process: makes system calls on some files fail as bad storage does.
   fault_arm("pwritev", ENOSPC, "/log", 2, 1): the third write to a path with "/log" fails, once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SHORT (-1)  /* not an error: half of what was asked for */
#define NO_DIRECT (-2)  /* opening with O_DIRECT is refused */

static struct { char call[16], path[64]; int code, after, times; } fault;

void fault_arm(const char *call, int code, const char *path, int after, int times) {
  strncpy(fault.call, call, sizeof fault.call - 1);
  strncpy(fault.path, path, sizeof fault.path - 1);
  fault.code = code; fault.after = after; fault.times = times;
}

static int hit(const char *call, const char *path) {
  if (!fault.code || strcmp(call, fault.call) || !strstr(path, fault.path)) return 0;
  if (fault.after-- > 0 || fault.times-- <= 0) return 0;
  errno = fault.code;
  return 1;
}

static int hit_fd(const char *call, int fd) {
  char link[32], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return hit(call, path);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int open64(const char *path, int flags, ...) {
  REAL(open64);
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if (fault.code == NO_DIRECT) {
    if (flags & O_DIRECT && strstr(path, fault.path)) { errno = EINVAL; return -1; }
  } else if (hit("open", path)) return -1;
  return real(path, flags, mode);
}

/* A short transfer: the first buffer alone, or half of it if there is no other. */
static ssize_t cut(const struct iovec *from, int count, struct iovec *to) {
  *to = from[0];
  if (count == 1 && to->iov_len > 1) to->iov_len /= 2;
  return 1;
}

ssize_t pwritev64v2(int fd, const struct iovec *data, int count, off64_t offset, int flags) {
  REAL(pwritev64v2);
  struct iovec half;
  if (hit_fd("pwritev", fd)) {
    if (fault.code != SHORT) return -1;
    count = cut(data, count, &half); data = &half;
  }
  return real(fd, data, count, offset, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *data, int count, off64_t offset, int flags) {
  REAL(preadv64v2);
  struct iovec half;
  if (hit_fd("preadv", fd)) {
    if (fault.code != SHORT) return -1;
    count = cut(data, count, &half); data = &half;
  }
  return real(fd, data, count, offset, flags);
}

ssize_t read(int fd, void *data, size_t size) {
  REAL(read);
  return hit_fd("read", fd) ? -1 : real(fd, data, size);
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  return hit_fd("write", fd) ? -1 : real(fd, data, size);
}

int fsync(int fd) {
  REAL(fsync);
  return hit_fd("fsync", fd) ? -1 : real(fd);
}

int close(int fd) {
  REAL(close);
  if (!hit_fd("close", fd)) return real(fd);
  real(fd);  /* the descriptor is gone, error or not */
  errno = fault.code;
  return -1;
}

int rename(const char *from, const char *to) {
  REAL(rename);
  return hit("rename", to) ? -1 : real(from, to);
}

int ftruncate64(int fd, off64_t size) {
  REAL(ftruncate64);
  return hit_fd("ftruncate", fd) ? -1 : real(fd, size);
}

/* fault_arm("clock", 3600, "", 0, 0): this host's wall clock is an hour ahead. */
int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime);
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME && !strcmp(fault.call, "clock")) now->tv_sec += fault.code;
  return result;
}

int unlink(const char *path) {
  REAL(unlink);
  return hit("unlink", path) ? -1 : real(path);
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  return hit("mkdir", path) ? -1 : real(path, mode);
}
