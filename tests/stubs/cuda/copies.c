/* Copies, streams, events, host functions and host memory. A copy is done when its call returns, after what was queued
 * on its stream before; only host functions run on beside their caller, and keep a lock waiting as kernels would. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "process.h"

enum { PAGE = 4096, CHUNK = 1 << 16 };

/* Work is done in order: each piece has a number and waits until `done` has come to it. */
struct stream {
    uint64_t queued, done;
};

struct event {
    int is_recorded;
    double at_ms;
};

static struct {
    uint64_t address, bytes;
    int is_ours;
} hosts[MAX_HOST];

static struct stream default_stream;
static pthread_mutex_t streams = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved_on = PTHREAD_COND_INITIALIZER;
static uint64_t all_queued, all_done;

/* ---- streams ----------------------------------------------------------------------------------------------------- */

/* 0, 1 and 2 are the names of the default stream. */
static struct stream *stream_of(CUstream stream) {
    return (uint64_t)stream <= 2 ? &default_stream : stream;
}

static void wait_stream(CUstream stream) {
    struct stream *one = stream_of(stream);
    pthread_mutex_lock(&streams);
    for (uint64_t until = one->queued; one->done < until;) pthread_cond_wait(&moved_on, &streams);
    pthread_mutex_unlock(&streams);
}

struct host_work {
    struct stream *stream;
    uint64_t number;
    void (*function)(void *);
    void *data;
};

static void *run_host_work(void *argument) {
    struct host_work work = *(struct host_work *)argument;
    free(argument);
    pthread_mutex_lock(&streams);
    while (work.stream->done + 1 < work.number) pthread_cond_wait(&moved_on, &streams);
    pthread_mutex_unlock(&streams);
    work.function(work.data);
    pthread_mutex_lock(&streams);
    work.stream->done++;
    all_done++;
    pthread_cond_broadcast(&moved_on);
    pthread_mutex_unlock(&streams);
    process_work(-1);
    return NULL;
}

CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data) {
    ENTER();
    struct host_work *work = malloc(sizeof *work);
    pthread_mutex_lock(&streams);
    *work = (struct host_work){stream_of(stream), ++stream_of(stream)->queued, function, data};
    all_queued++;
    pthread_mutex_unlock(&streams);
    process_work(1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_host_work, work)) abort();
    pthread_detach(thread);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER();
    (void)flags;
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!process_has_free(current_context->gpu, scenario_facts().stream_bytes)) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    *stream = calloc(1, sizeof **stream);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    (void)priority;
    return cuStreamCreate(stream, flags);
}

/* Whatever a call waits for, it waits with the gate held but not the guard: other threads' calls go on. */
#define WAITING(wait)                                            \
    do {                                                         \
        CUresult entered = process_enter(__func__, -1, 1);       \
        if (!entered) wait;                                      \
        process_leave();                                         \
        return entered;                                          \
    } while (0)

CUresult cuStreamSynchronize(CUstream stream) {
    WAITING(wait_stream(stream));
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    WAITING((wait_stream(stream), (uint64_t)stream > 2 ? free(stream) : (void)0));
}

/* Nothing is recorded here: each thread has a mode, which decides nothing. */
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int own;
    ENTER();
    if (*mode < 0 || *mode > 2) LEAVE(CUDA_ERROR_INVALID_VALUE);
    int before = own;
    own = *mode;
    *mode = before;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuStreamQuery(CUstream stream) {
    ENTER();
    pthread_mutex_lock(&streams);
    int is_done = stream_of(stream)->done == stream_of(stream)->queued;
    pthread_mutex_unlock(&streams);
    LEAVE(is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

static void wait_all(void) {
    pthread_mutex_lock(&streams);
    for (uint64_t until = all_queued; all_done < until;) pthread_cond_wait(&moved_on, &streams);
    pthread_mutex_unlock(&streams);
}

CUresult cuCtxSynchronize(void) {
    WAITING(wait_all());
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER();
    (void)flags;
    *event = calloc(1, sizeof **event);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event) {
    ENTER();
    free(event);
    LEAVE(CUDA_SUCCESS);
}

static void record(CUevent event, CUstream stream) {
    wait_stream(stream);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->at_ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    event->is_recorded = 1;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    WAITING(record(event, stream));
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER();
    (void)stream, (void)event, (void)flags; /* what it stands for is done: see record */
    LEAVE(CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER();
    (void)event;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuEventQuery(CUevent event) {
    ENTER();
    (void)event;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    ENTER();
    if (!start->is_recorded || !end->is_recorded) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    *ms = (float)(end->at_ms - start->at_ms);
    LEAVE(CUDA_SUCCESS);
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Whether all of the range is video memory that may be reached: one piece after the other. */
static int is_reachable(uint64_t va, uint64_t bytes) {
    while (bytes) {
        struct region *region = region_at(va);
        if (!region || !region->is_accessible) return 0;
        uint64_t part = region->va + region->bytes - va;
        if (part >= bytes) return 1;
        va += part;
        bytes -= part;
    }
    return 1;
}

enum side { HOST, DEVICE, EITHER };

static int is_allowed(enum side side, uint64_t va, uint64_t bytes) {
    if (side == HOST || (side == EITHER && !region_at(va))) return 1;
    return is_reachable(va, bytes);
}

/* One side of a copy: its file, if it is video memory, and whether that has a hole there. */
struct side_file {
    int fd, is_hole;
    uint64_t va, end, bytes; /* for so many it has a hole, or has none */
};

/* Small copies need none. */
static struct side_file file_at(uint64_t va, uint64_t bytes) {
    struct region *region = bytes < CHUNK ? NULL : region_at(va);
    if (!region || !region->block || va + bytes > region->va + region->bytes) return (struct side_file){.fd = -1};
    return (struct side_file){.fd = node_open_piece(region->block->id), .va = region->va, .end = va + bytes};
}

static void look(struct side_file *one, uint64_t at) {
    one->is_hole = 0;
    one->bytes = UINT64_MAX;
    if (one->fd < 0) return;
    off_t from = (off_t)(at - one->va), end = (off_t)(one->end - one->va), data = lseek(one->fd, from, SEEK_DATA);
    if (data < 0 || data > end) data = end;
    one->is_hole = data > from;
    if (!one->is_hole) data = lseek(one->fd, from, SEEK_HOLE);
    one->bytes = (uint64_t)((data < end ? data : end) - from);
}

static const char zeros[CHUNK];

/* So much from one side to the other. A file is read and written as such: through a mapping, the kernel takes a fault for
 * each page, and reads what is around it. */
static void move_part(uint64_t to, const struct side_file *target, uint64_t from, const struct side_file *source,
                      uint64_t bytes) {
    static _Thread_local char read[CHUNK];
    const char *content = source->is_hole ? zeros : source->fd < 0 ? (const char *)from : read;
    if (content == read && pread(source->fd, read, bytes, (off_t)(from - source->va)) != (ssize_t)bytes) abort();
    int is_empty = content == zeros || !memcmp(content, zeros, bytes);
    if (is_empty && (target->is_hole || (target->fd < 0 && !memcmp((void *)to, zeros, bytes)))) return;
    if (target->fd < 0) memcpy((void *)to, content, bytes);
    else if (pwrite(target->fd, content, bytes, (off_t)(to - target->va)) != (ssize_t)bytes) abort();
}

/* Zeros are left alone where there are zeros already: what nobody ever wrote stays a hole in its file, and large pieces
 * with little in them take no disk. */
static void move(uint64_t to, struct side_file target, uint64_t from, struct side_file source, uint64_t bytes) {
    if (to < from + bytes && from < to + bytes) {
        memmove((void *)to, (void *)from, bytes);
        return;
    }
    for (uint64_t part; bytes; to += part, from += part, bytes -= part, target.bytes -= part, source.bytes -= part) {
        if (!target.bytes) look(&target, to);
        if (!source.bytes) look(&source, from);
        part = source.is_hole && target.is_hole ? bytes : CHUNK - to % CHUNK;
        if (part > source.bytes) part = source.bytes;
        if (part > target.bytes) part = target.bytes;
        if (part > bytes) part = bytes;
        if (!source.is_hole || !target.is_hole) move_part(to, &target, from, &source, part);
    }
}

static CUresult copy(const char *function, uint64_t to, enum side to_side, uint64_t from, enum side from_side,
                     uint64_t bytes, CUstream stream) {
    CUresult result = process_enter(function, -1, 1);
    if (!result && !current_context) result = CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&process_guard);
    if (!result && (!is_allowed(to_side, to, bytes) || !is_allowed(from_side, from, bytes)))
        result = CUDA_ERROR_INVALID_VALUE;
    struct side_file target = {.fd = -1}, source = {.fd = -1};
    if (!result) target = file_at(to, bytes), source = file_at(from, bytes);
    pthread_mutex_unlock(&process_guard);
    if (!result) {
        wait_stream(stream);
        move(to, target, from, source, bytes);
    }
    if (target.fd >= 0) close(target.fd);
    if (source.fd >= 0) close(source.fd);
    process_leave();
    return result;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy(__func__, to, EITHER, from, EITHER, bytes, NULL);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(__func__, to, EITHER, from, EITHER, bytes, stream);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return copy(__func__, to, DEVICE, (uint64_t)from, HOST, bytes, NULL);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return copy(__func__, to, DEVICE, (uint64_t)from, HOST, bytes, stream);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return copy(__func__, (uint64_t)to, HOST, from, DEVICE, bytes, NULL);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(__func__, (uint64_t)to, HOST, from, DEVICE, bytes, stream);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy(__func__, to, DEVICE, from, DEVICE, bytes, NULL);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(__func__, to, DEVICE, from, DEVICE, bytes, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
                           CUstream stream) {
    if (!to_context || !from_context || !to_context->users || !from_context->users) return CUDA_ERROR_INVALID_CONTEXT;
    return copy(__func__, to, DEVICE, from, DEVICE, bytes, stream);
}

/* Of programs there is the one that copies words of 16 bytes: where to, where from, and how many. */
static char the_program, the_function;

CUresult cuModuleLoadData(void **module, const void *image) {
    ENTER();
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (memcmp(image, "\177ELF", 4)) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *module = &the_program;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuModuleUnload(void *module) {
    ENTER();
    LEAVE(module == &the_program ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER();
    if (module != &the_program) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (strcmp(name, "copy_words")) LEAVE(CUDA_ERROR_NOT_FOUND);
    *function = &the_function;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuLaunchKernel(void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int x,
                        unsigned int y, unsigned int z, unsigned int shared, CUstream stream, void **values,
                        void **extra) {
    if (function != &the_function || extra) return CUDA_ERROR_INVALID_HANDLE;
    if (!(grid_x && x) || grid_y != 1 || grid_z != 1 || y != 1 || z != 1 || shared) return CUDA_ERROR_INVALID_VALUE;
    uint64_t to = *(uint64_t *)values[0], from = *(uint64_t *)values[1], words = *(uint64_t *)values[2];
    if (to % 16 || from % 16) return CUDA_ERROR_INVALID_VALUE;
    return copy(__func__, to, DEVICE, from, DEVICE, words * 16, stream);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes) {
    return cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, NULL);
}

static CUresult fill(const char *function, CUdeviceptr to, unsigned int value, size_t count, int width, CUstream stream) {
    CUresult result = process_enter(function, -1, 1);
    pthread_mutex_lock(&process_guard);
    if (!result && !is_reachable(to, count * (size_t)width)) result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&process_guard);
    if (!result) {
        wait_stream(stream);
        for (size_t i = 0; i < count; i++) memcpy((char *)to + i * (size_t)width, &value, (size_t)width);
    }
    process_leave();
    return result;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return fill(__func__, to, value, count, 1, NULL);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return fill(__func__, to, value, count, 1, stream);
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
    return fill(__func__, to, value, count, 4, NULL);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    return fill(__func__, to, value, count, 4, stream);
}

/* ---- host memory ------------------------------------------------------------------------------------------------- */

static int host_at(uint64_t address, uint64_t bytes) {
    for (int i = 0; i < MAX_HOST; i++)
        if (hosts[i].bytes && address < hosts[i].address + hosts[i].bytes && hosts[i].address < address + bytes) return i;
    return -1;
}

static CUresult note_host(uint64_t address, uint64_t bytes, int is_ours) {
    for (int i = 0; i < MAX_HOST; i++)
        if (!hosts[i].bytes) {
            hosts[i].address = address, hosts[i].bytes = bytes, hosts[i].is_ours = is_ours;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags) {
    ENTER();
    (void)flags;
    uint64_t first = (uint64_t)address / PAGE * PAGE, end = (uint64_t)address + bytes;
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!bytes || msync((void *)first, end - first, MS_ASYNC)) LEAVE(CUDA_ERROR_INVALID_VALUE); /* not mapped */
    if (madvise((void *)first, end - first, 22 /* MADV_POPULATE_READ */) && errno == EFAULT)
        LEAVE(CUDA_ERROR_INVALID_VALUE); /* beyond the end of its file */
    if (host_at((uint64_t)address, bytes) >= 0) LEAVE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    LEAVE(note_host((uint64_t)address, bytes, 0));
}

CUresult cuMemHostUnregister(void *address) {
    ENTER();
    int found = host_at((uint64_t)address, 1);
    if (found < 0 || hosts[found].address != (uint64_t)address) LEAVE(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    hosts[found].bytes = 0;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    ENTER();
    *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    LEAVE(note_host((uint64_t)*address, bytes, 1));
}

CUresult cuMemFreeHost(void *address) {
    ENTER();
    int found = host_at((uint64_t)address, 1);
    if (found < 0 || !hosts[found].is_ours || hosts[found].address != (uint64_t)address) LEAVE(CUDA_ERROR_INVALID_VALUE);
    munmap(address, hosts[found].bytes);
    hosts[found].bytes = 0;
    LEAVE(CUDA_SUCCESS);
}
