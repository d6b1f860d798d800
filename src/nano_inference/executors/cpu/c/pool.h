/* A pool of threads that executes a list of jobs together; the caller is one of the threads.
 *
 * A job is a number of pieces, assigned by an atomic counter; it ends when all its pieces are done. There is no
 * barrier between jobs, so a descheduled thread delays only its current piece: it then skips the jobs that are
 * finished. The end of a run waits only for threads inside it; a thread that wakes up later does not enter. */
#ifndef NANO_POOL_H
#define NANO_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include "vec.h"

#define MAX_THREADS 256
#define MAX_JOBS 8192

typedef struct Pool Pool;
typedef struct {
    Pool *pool;
    int job;             /* index of its current job in this run */
    char *scratch;
    size_t scratch_bytes;
} Worker;
typedef void (*Body)(Worker *worker, void *argument);

struct Pool {
    int num_threads;
    int is_ending;
    Worker workers[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    pthread_mutex_t turn;    /* held during a run: serialises callers from several threads */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int num_sleeping;
    Body body;
    void *argument;
    long spin_ns;                                    /* how long a thread polls for work before it sleeps */
    _Atomic long generation __attribute__((aligned(64)));
    _Atomic int is_open __attribute__((aligned(64)));   /* 1: threads may still enter the run */
    _Atomic int num_inside __attribute__((aligned(64)));
    struct { _Atomic int next, done; } jobs[MAX_JOBS] __attribute__((aligned(64)));
};

INLINE void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

/* Busy-wait; yield the CPU after a while, because there may be fewer cores than threads. */
#define WAIT_UNTIL(condition)                                                                                          \
    for (long i_ = 0; !(condition); i_++) {                                                                            \
        if (i_ < 2000) relax();                                                                                        \
        else sched_yield();                                                                                            \
    }

/* The next piece of this thread's current job, or -1 if none is left. */
INLINE long next_piece(Worker *w, long num_pieces) {
    if (atomic_load_explicit(&w->pool->jobs[w->job].next, memory_order_relaxed) >= num_pieces) return -1;
    const long piece = atomic_fetch_add_explicit(&w->pool->jobs[w->job].next, 1, memory_order_relaxed);
    return piece < num_pieces ? piece : -1;
}
/* The piece that the next call of `next_piece` would return now. */
INLINE long likely_piece(const Worker *w) {
    return atomic_load_explicit(&w->pool->jobs[w->job].next, memory_order_relaxed);
}
INLINE void begin_job(Worker *w) { w->job++; }
INLINE void piece_done(Worker *w) {
    atomic_fetch_add_explicit(&w->pool->jobs[w->job].done, 1, memory_order_acq_rel);
}
INLINE void finish_job(Worker *w, long num_pieces) {
    WAIT_UNTIL(atomic_load_explicit(&w->pool->jobs[w->job].done, memory_order_acquire) >= num_pieces)
}

/* Process pieces of a job until none is left. */
#define FOR_PIECES(w, piece, count)                                                                                    \
    for (long piece; (piece = next_piece(w, count)) >= 0; piece_done(w))

/* Scratch memory of this thread, aligned to 64 bytes; growing may discard its contents. NULL: out of memory. */
static void *scratch_of(Worker *w, size_t bytes) {
    if (bytes > w->scratch_bytes) {
        free(w->scratch);
        w->scratch_bytes = 0;
        w->scratch = aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
        if (w->scratch) w->scratch_bytes = bytes;
    }
    return w->scratch;
}

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}
INLINE int has_news(Pool *p, long seen) { return atomic_load_explicit(&p->generation, memory_order_acquire) != seen; }

/* Wait for the next run; poll for a while before sleeping, because steps follow each other closely. */
static void wait_for_news(Pool *p, long seen) {
    const long deadline = nanoseconds() + p->spin_ns;
    while (!has_news(p, seen) && nanoseconds() < deadline)
        for (int i = 0; i < 32 && !has_news(p, seen); i++) relax();
    if (has_news(p, seen)) return;
    pthread_mutex_lock(&p->mutex);
    p->num_sleeping++;
    while (!has_news(p, seen)) pthread_cond_wait(&p->wake, &p->mutex);
    p->num_sleeping--;
    pthread_mutex_unlock(&p->mutex);
}

static void *thread_main(void *argument) {
    Worker *w = argument;
    Pool *p = w->pool;
    for (long seen = 0;;) {
        wait_for_news(p, seen);
        seen = atomic_load_explicit(&p->generation, memory_order_acquire);
        if (p->is_ending) return NULL;
        atomic_fetch_add(&p->num_inside, 1);         /* increment, then check is_open: the run's end does the reverse */
        if (atomic_load(&p->is_open)) {
            w->job = -1;
            p->body(w, p->argument);
        }
        atomic_fetch_sub(&p->num_inside, 1);
    }
}

static void pool_announce(Pool *p) {
    pthread_mutex_lock(&p->mutex);
    atomic_fetch_add_explicit(&p->generation, 1, memory_order_release);
    if (p->num_sleeping) pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
}

/* Run `body` in every thread; return when all have left it. It may start at most `num_jobs` jobs. */
static void pool_run(Pool *p, int num_jobs, Body body, void *argument) {
    pthread_mutex_lock(&p->turn);
    for (int i = 0; i < num_jobs; i++) {
        atomic_store_explicit(&p->jobs[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&p->jobs[i].done, 0, memory_order_relaxed);
    }
    p->body = body;
    p->argument = argument;
    p->workers[0].job = -1;
    atomic_store(&p->is_open, 1);
    if (p->num_threads > 1) pool_announce(p);
    body(&p->workers[0], argument);
    atomic_store(&p->is_open, 0);
    WAIT_UNTIL(atomic_load(&p->num_inside) == 0)
    pthread_mutex_unlock(&p->turn);
}

void nano_pool_free(Pool *p) {
    if (!p) return;
    p->is_ending = 1;
    if (p->num_threads > 1) pool_announce(p);
    for (int i = 1; i < p->num_threads; i++) pthread_join(p->threads[i], NULL);
    for (int i = 0; i < p->num_threads; i++) free(p->workers[i].scratch);
    pthread_mutex_destroy(&p->turn);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->wake);
    free(p);
}

Pool *nano_pool_new(int num_threads, long spin_ns) {
    if (num_threads < 1 || num_threads > MAX_THREADS) return NULL;
    Pool *p = aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
    if (!p) return NULL;
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->turn, NULL);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->spin_ns = spin_ns;
    p->num_threads = 1;
    p->workers[0] = (Worker){.pool = p};
    for (int i = 1; i < num_threads; i++) {
        p->workers[i] = (Worker){.pool = p};
        if (pthread_create(&p->threads[i], NULL, thread_main, &p->workers[i])) break;
        p->num_threads = i + 1;
    }
    return p;
}

#endif
