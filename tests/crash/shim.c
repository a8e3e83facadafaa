/* Stands between a process and the system's calls on the files of one folder: counts them, records them, and at a chosen
   one kills the process or has the call fail. Loaded with LD_PRELOAD; does nothing until shim_arm() is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { WRITE = 1, SYNC = 2, TRUNCATE = 4, LOCK = 8, NAME = 16, READ = 32, OPEN = 64, MAP = 128 };
enum action { NOTHING, KILL_BEFORE, KILL_AFTER, KILL_HALFWAY, FAIL, FAIL_HALFWAY };
enum verdict { GO_ON, REFUSED, HALF, THEN_DIE };

static char folder[4096];
static size_t folder_length;
static int mask, action, error_number, is_sticky, record_fd = -1;
static long chosen, counted;

/* what: the kinds that are counted, or'ed. at: the number of the call that is meant, from 1. record: a descriptor. */
void shim_arm(const char *in, int what, int how, long at, int error, int sticky, int record) {
    folder_length = strlen(in);
    if (folder_length >= sizeof folder) folder_length = 0;
    memcpy(folder, in, folder_length);
    action = how, chosen = at, error_number = error, is_sticky = sticky, record_fd = record, counted = 0;
    mask = folder_length ? what : 0;
}

void shim_disarm(void) { mask = 0, action = NOTHING, record_fd = -1; }

long shim_count(void) { return counted; }

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static int is_ours(const char *path) {
    return mask && strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || !path[folder_length]);
}

static int is_our_file(int fd, char *path) {
    if (!mask || fd < 0) return 0;
    int before = errno;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, 4095);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return is_ours(path);
}

static char disturbed[4200];

/* Which call was disturbed first: its kind and its path. */
const char *shim_disturbed(void) { return disturbed; }

static enum verdict enter(enum kind kind, const char *path) {
    if (!(mask & kind)) return GO_ON;
    long number = __sync_add_and_fetch(&counted, 1);
    if (number != chosen && !(is_sticky && number > chosen)) return GO_ON;
    if (number == chosen) snprintf(disturbed, sizeof disturbed, "%d %s", kind, path + folder_length);
    switch (action) {
    case KILL_BEFORE: die(); return GO_ON;
    case KILL_AFTER: return THEN_DIE;
    case KILL_HALFWAY: if (kind != WRITE) die(); return HALF;
    case FAIL: errno = error_number; return REFUSED;
    case FAIL_HALFWAY: if (kind == WRITE && number == chosen) return HALF; errno = error_number; return REFUSED;
    default: return GO_ON;
    }
}

/* An unlock cannot fail on a local file system; it is counted, for what dies there. */
static enum verdict enter_lock(int is_unlock, const char *path) {
    enum verdict verdict = enter(LOCK, path);
    return verdict == REFUSED && is_unlock ? GO_ON : verdict;
}

struct record { uint32_t kind, path_length, other_length, unused; uint64_t inode; int64_t offset; uint64_t length; };

static void record(char kind, const char *path, const char *other, int fd, int64_t offset, const void *data, uint64_t length) {
    if (record_fd < 0) return;
    int before = errno;
    struct stat found;
    memset(&found, 0, sizeof found);
    if (fd >= 0 ? fstat(fd, &found) : stat(path, &found)) found.st_ino = 0;
    struct record head = {kind, strlen(path), strlen(other), 0, found.st_ino, offset, length};
    struct iovec parts[4] = {{&head, sizeof head}, {(void *)path, head.path_length}, {(void *)other, head.other_length},
                             {(void *)data, data ? length : 0}};
    syscall(SYS_writev, record_fd, parts, 4);
    errno = before;
}

/* Puts a remark among what is recorded, or on any descriptor. */
void shim_mark(const char *text) { record('m', text, "", record_fd, 0, NULL, 0); }

static ssize_t done(enum verdict verdict, ssize_t result) {
    if (verdict == THEN_DIE || (verdict == HALF && action == KILL_HALFWAY)) die();
    return result;
}

#define WRITING(name, parameters, call_half, call, where) \
    ssize_t name parameters { \
        REAL(name); \
        char path[4096]; \
        if (!is_our_file(fd, path)) return call; \
        enum verdict verdict = enter(WRITE, path); \
        if (verdict == REFUSED) return -1; \
        int64_t offset = where; \
        ssize_t written = verdict == HALF && size > 1 ? call_half : call; \
        if (written > 0) record('w', path, "", fd, offset, data, written); \
        return done(verdict, written); \
    }

WRITING(write, (int fd, const void *data, size_t size), real(fd, data, size / 2), real(fd, data, size),
        lseek(fd, 0, SEEK_CUR))
WRITING(pwrite, (int fd, const void *data, size_t size, off_t at), real(fd, data, size / 2, at),
        real(fd, data, size, at), at)
WRITING(pwrite64, (int fd, const void *data, size_t size, off64_t at), real(fd, data, size / 2, at),
        real(fd, data, size, at), at)

#define PLAIN(type, name, parameters, call, kind, after) \
    type name parameters { \
        REAL(name); \
        char path[4096]; \
        if (!is_our_file(fd, path)) return call; \
        enum verdict verdict = enter(kind, path); \
        if (verdict == REFUSED) return -1; \
        type result = call; \
        after; \
        return done(verdict, result); \
    }

PLAIN(ssize_t, read, (int fd, void *data, size_t size), real(fd, data, size), READ, )
PLAIN(ssize_t, pread, (int fd, void *data, size_t size, off_t at), real(fd, data, size, at), READ, )
PLAIN(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), real(fd, data, size, at), READ, )
PLAIN(int, fsync, (int fd), real(fd), SYNC, if (!result) record('s', path, "", fd, 0, NULL, 0))
PLAIN(int, fdatasync, (int fd), real(fd), SYNC, if (!result) record('s', path, "", fd, 0, NULL, 0))
PLAIN(int, ftruncate, (int fd, off_t size), real(fd, size), TRUNCATE,
      if (!result) record('t', path, "", fd, size, NULL, 0))
PLAIN(int, ftruncate64, (int fd, off64_t size), real(fd, size), TRUNCATE,
      if (!result) record('t', path, "", fd, size, NULL, 0))
static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}

#define CONTROL(name) \
    int name(int fd, int command, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        char path[4096]; \
        if (!is_lock(command) || !is_our_file(fd, path)) return real(fd, command, argument); \
        enum verdict verdict = enter_lock(((struct flock *)argument)->l_type == F_UNLCK, path); \
        if (verdict == REFUSED) return -1; \
        return (int)done(verdict, real(fd, command, argument)); \
    }

int flock(int fd, int how) {
    REAL(flock);
    char path[4096];
    if (!is_our_file(fd, path)) return real(fd, how);
    enum verdict verdict = enter_lock((how & LOCK_UN) != 0, path);
    if (verdict == REFUSED) return -1;
    return (int)done(verdict, real(fd, how));
}

CONTROL(fcntl)
CONTROL(fcntl64)

#define OPENING(name) \
    int name(const char *given, int flags, ...) { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (!is_ours(given)) return real(given, flags, mode); \
        struct stat found; \
        int before = errno, is_new = flags & O_CREAT && stat(given, &found) != 0; \
        errno = before; \
        enum verdict verdict = enter(is_new ? NAME : OPEN, given); \
        if (verdict == REFUSED) return -1; \
        int fd = real(given, flags, mode); \
        if (fd >= 0 && is_new) record('c', given, "", fd, 0, NULL, 0); \
        if (fd >= 0 && !is_new && flags & O_TRUNC) record('t', given, "", fd, 0, NULL, 0); \
        return (int)done(verdict, fd); \
    }

OPENING(open)
OPENING(open64)

#define NAMING(name, parameters, call, one, after) \
    int name parameters { \
        REAL(name); \
        if (!is_ours(one)) return call; \
        enum verdict verdict = enter(NAME, one); \
        if (verdict == REFUSED) return -1; \
        int result = call; \
        if (!result) after; \
        return (int)done(verdict, result); \
    }

NAMING(unlink, (const char *path), real(path), path, record('u', path, "", -1, 0, NULL, 0))
NAMING(mkdir, (const char *path, mode_t mode), real(path, mode), path, record('d', path, "", -1, 0, NULL, 0))
NAMING(rename, (const char *from, const char *to), real(from, to), to, record('r', from, to, -1, 0, NULL, 0))
NAMING(link, (const char *from, const char *to), real(from, to), to, record('l', from, to, -1, 0, NULL, 0))

#define MAPPING(name, offset_type) \
    void *name(void *address, size_t size, int protection, int flags, int fd, offset_type at) { \
        REAL(name); \
        char path[4096]; \
        if (fd < 0 || !is_our_file(fd, path)) return real(address, size, protection, flags, fd, at); \
        enum verdict verdict = enter(MAP, path); \
        if (verdict == REFUSED) return MAP_FAILED; \
        void *result = real(address, size, protection, flags, fd, at); \
        done(verdict, 0); \
        return result; \
    }

MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

/* SQLite waits for locks that are refused; here they would stay so. */
static int is_impatient(void) { return mask && (action == FAIL || action == FAIL_HALFWAY); }

int usleep(useconds_t time) {
    REAL(usleep);
    return is_impatient() ? 0 : real(time);
}

int nanosleep(const struct timespec *time, struct timespec *rest) {
    REAL(nanosleep);
    return is_impatient() ? 0 : real(time, rest);
}
