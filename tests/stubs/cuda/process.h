/* This process as the stub's driver has it: devices and contexts, the video memory it holds and where that is mapped,
 * and the gate that every call goes through and that a locked process finds shut.
 *
 * One mutex (`process_guard`) over all of it. The gate is taken first, then the guard, then the node's lock.
 */
#ifndef HEGM_STUB_PROCESS_H
#define HEGM_STUB_PROCESS_H

#include <pthread.h>
#include <time.h>

#include "cuda.h"
#include "node.h"
#include "scenario.h"

enum { MAX_BLOCKS = 1 << 16, MAX_REGIONS = 1 << 16, MAX_HOST = 4096 };

/* A device of this process, by ordinal: CUDA_VISIBLE_DEVICES chooses which, a restore may change the GPU under it. */
struct context {
    int ordinal, gpu, users;
    int first; /* the GPU that it was on at the start: what its memory counts as being on for good */
    size_t stack_bytes; /* kept for each thread; its share of the context's memory goes with it */
    unsigned int peers; /* ordinals whose memory it may reach */
};

/* A piece of video memory that this process holds. */
struct block {
    uint64_t id, bytes; /* id 0: a free place */
    int counts_as;      /* the GPU that it is said to be on, which another process may see as an old one */
    int gpu, fd;        /* an open file that holds it, for memory made with cuMemCreate; else -1: its mapping holds it */
    int handles, maps;  /* gone when both are 0 */
    int is_foreign;     /* another process made it */
    int is_restored;    /* the driver has brought it back, and nobody else can open it any more */
    void *saved;        /* its content, while the process is checkpointed */
};

enum region_kind { REGION_FREE, REGION_ALLOC, REGION_IPC, REGION_RESERVED, REGION_MAPPED };

/* A range of addresses. A reserved one may have mapped ones over it. */
struct region {
    enum region_kind kind;
    uint64_t va, bytes;
    struct block *block;
    int is_accessible;
};

extern struct context contexts[NODE_GPUS];
extern int context_count;
extern struct block blocks[MAX_BLOCKS];
extern struct region regions[MAX_REGIONS];
extern int regions_top;
extern pthread_mutex_t process_guard;
extern _Thread_local CUcontext current_context;

/* Whether so much is free on that GPU. */
int process_has_free(int gpu, uint64_t bytes);

/* ---- the gate ---- */

/* Every call but the few that touch nothing: notes it, waits while this process is locked, gives back an ordered error.
 * Pairs with process_leave. */
CUresult process_enter(const char *function, long subject, int needs_init);
void process_leave(void);
/* Shuts the gate once no call and no work is under way; 0 when that was not so before the deadline (NULL: no limit). */
int process_shut(const struct timespec *deadline);
void process_open(void);
/* Counts work that goes on after its call has returned. */
void process_work(int change);

/* Makes this process one that can be checkpointed: its thread answers what is asked of it from now on. */
void process_answer(void);

/* ---- under process_guard ---- */

struct region *region_at(uint64_t va);
struct region *region_add(enum region_kind kind, uint64_t va, uint64_t bytes, struct block *block);
struct block *block_add(uint64_t id, uint64_t bytes, int gpu, int fd);
/* One use less; without any the process holds it no more. */
void block_put(struct block *block);

/* ---- steps of the driver's thread, with the gate shut; memory.c ---- */

CUresult memory_save(void);
CUresult memory_restore(const int *map);

#define ENTER_ABOUT(subject)                                          \
    do {                                                              \
        CUresult entered = process_enter(__func__, subject, 1);       \
        if (entered) return process_leave(), entered;                 \
        pthread_mutex_lock(&process_guard);                           \
    } while (0)
#define ENTER() ENTER_ABOUT(-1)
#define LEAVE(result)                                                 \
    do {                                                              \
        CUresult leaving = (result);                                  \
        pthread_mutex_unlock(&process_guard);                         \
        process_leave();                                              \
        return leaving;                                               \
    } while (0)

#endif
