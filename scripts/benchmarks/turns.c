/* Records each turn of a process's event loop: from the return of one `epoll_pwait` of the main thread to the next
   call, of which how much it ran, and how long it waited for the interpreter's lock. The file TURNS_FOLDER/PID has a
   count, then the last `NUM_TURNS` turns; see turns.py.

   cc -shared -fPIC -O2 -o turns.so turns.c -ldl; LD_PRELOAD=turns.so TURNS_FOLDER=folder python ... */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define NUM_TURNS (1 << 20)

struct turn {
    uint64_t began;               /* nanoseconds of CLOCK_MONOTONIC, as all others */
    uint32_t took, ran;           /* wall clock; CPU of the thread */
    uint32_t waited;              /* for the interpreter's lock */
    uint32_t events;              /* for which the loop woke up */
};

struct book {
    uint64_t count;
    struct turn turns[NUM_TURNS];
};

static struct book *book;
static pid_t owner;
static struct turn present; /* began is 0 outside of a turn */
static uint64_t ran_before;
static __thread int is_loop; /* whether this thread turns */

static uint64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static struct book *own_book(void) {
    const char *folder = getenv("TURNS_FOLDER");
    if (owner != getpid() && folder != NULL) { /* workers are forked */
        char path[4096];
        owner = getpid();
        snprintf(path, sizeof path, "%s/%d", folder, owner);
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, sizeof *book)) abort();
        book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (book == MAP_FAILED) abort();
        close(file);
    }
    return book;
}

int epoll_pwait(int poll, struct epoll_event *events, int most, int timeout, const sigset_t *mask) {
    static int (*real)(int, struct epoll_event *, int, int, const sigset_t *);
    if (real == NULL) real = dlsym(RTLD_NEXT, "epoll_pwait");
    struct book *mine = gettid() == getpid() ? own_book() : NULL;
    is_loop = mine != NULL;
    if (mine != NULL && present.began) {
        present.took = now(CLOCK_MONOTONIC) - present.began;
        present.ran = now(CLOCK_THREAD_CPUTIME_ID) - ran_before;
        mine->turns[mine->count % NUM_TURNS] = present;
        __atomic_store_n(&mine->count, mine->count + 1, __ATOMIC_RELEASE);
    }
    int found = real(poll, events, most, timeout, mask);
    if (mine != NULL) {
        present = (struct turn){.began = now(CLOCK_MONOTONIC), .events = found < 0 ? 0 : found};
        ran_before = now(CLOCK_THREAD_CPUTIME_ID);
    }
    return found;
}

/* Python waits with it for its lock, and for nothing else. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (real == NULL) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* not an older one */
    if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (!is_loop) return real(condition, mutex, until);
    uint64_t began = now(CLOCK_MONOTONIC);
    int failed = real(condition, mutex, until);
    present.waited += now(CLOCK_MONOTONIC) - began;
    return failed;
}
