/* A libnccl for host memory: ranks of one machine exchange arrays through pipes of rank 0, so that the calls of
 * weights/nccl.py can be tested without a GPU. Only what it calls is here; rank 0 is the test's trainer. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int rank, size; int down[64], up[64]; int stop[2]; } comm;
static int num_aborts;

static size_t width(int type) {
    switch (type) {
    case 0: case 1: return 1;
    case 2: case 7: return 4;
    case 4: case 8: return 8;
    case 6: case 9: return 2;
    }
    return 0;
}

/* Move n bytes; return 0, 3 after an abort, 2 if the other end is gone. */
static int move(comm *c, int fd, char *place, size_t n, int writes) {
    while (n) {
        struct pollfd fds[2] = {{fd, writes ? POLLOUT : POLLIN, 0}, {c->stop[0], POLLIN, 0}};
        if (poll(fds, 2, -1) < 0 && errno != EINTR) return 2;
        if (fds[1].revents) return 3;
        if (!fds[0].revents) continue;
        ssize_t done = writes ? write(fd, place, n) : read(fd, place, n);
        if (done == 0 || (done < 0 && errno != EAGAIN && errno != EINTR)) return 2;
        if (done > 0) { place += done; n -= (size_t)done; }
    }
    return 0;
}

static int pipe_of(const char *base, int rank, const char *way) {
    char path[256];
    snprintf(path, sizeof path, "%s.%d.%s", base, rank, way);
    if (mkfifo(path, 0600) && errno != EEXIST) return -1;
    return open(path, O_RDWR);
}

int ncclGetUniqueId(ncclUniqueId *id) {
    const char *folder = getenv("NCCL_STUB_FOLDER");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/nccl-%d", folder ? folder : "/tmp", (int)getpid());
    return 0;
}

int ncclCommInitRank(void **out, int size, ncclUniqueId id, int rank) {
    if (rank < 0 || rank >= size || size > 64 || id.internal[127]) return 4;
    comm *c = calloc(1, sizeof *c);
    c->rank = rank;
    c->size = size;
    if (pipe(c->stop)) return 2;
    int first = rank ? rank : 1, last = rank ? rank : size - 1;
    for (int one = first; one <= last; one++) {
        c->down[one] = pipe_of(id.internal, one, "down");
        c->up[one] = pipe_of(id.internal, one, "up");
        if (c->down[one] < 0 || c->up[one] < 0) return 2;
    }
    *out = c;
    return 0;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *handle, void *stream) {
    comm *c = handle;
    size_t n = count * width(type);
    (void)stream;
    if (root || (count && !n)) return 4;
    if (c->rank) return move(c, c->down[c->rank], to, n, 0);
    for (int one = 1; one < c->size; one++) {
        int error = move(c, c->down[one], (char *)from, n, 1);
        if (error) return error;
    }
    return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *handle, void *stream) {
    comm *c = handle;
    float sum, other;
    if (type != 7 || op || count != 1) return 4;
    memcpy(&sum, from, sizeof sum);
    if (c->rank) {
        int error = move(c, c->up[c->rank], (char *)&sum, sizeof sum, 1);
        return error ? error : ncclBroadcast(0, to, 1, 7, 0, c, stream);
    }
    for (int one = 1; one < c->size; one++) {
        int error = move(c, c->up[one], (char *)&other, sizeof other, 0);
        if (error) return error;
        sum += other;
    }
    memcpy(to, &sum, sizeof sum);
    return ncclBroadcast(to, to, 1, 7, 0, c, stream);
}

/* Ends a call of another thread, which still uses the memory: it is not freed. */
int ncclCommAbort(void *handle) {
    comm *c = handle;
    num_aborts++;
    return write(c->stop[1], "", 1) == 1 ? 0 : 2;
}

/* Returns how many communicators this process has aborted. */
int stub_num_aborts(void) { return num_aborts; }

const char *ncclGetErrorString(int result) {
    return result == 3 ? "aborted" : result == 4 ? "invalid argument" : "unhandled system error";
}
