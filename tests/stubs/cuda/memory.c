/* Video memory of this process: allocated, made as handles, mapped, exported, opened from others; and how it leaves and
 * comes back when the process is checkpointed. Addresses stay what they were over that, as with the real driver. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "process.h"

enum { GRANULARITY = 2 << 20, SMALLEST = 512, CHUNK = 1 << 16, TYPE_DEVICE = 1, TYPE_DESCRIPTOR = 1 };

struct block blocks[MAX_BLOCKS];
struct region regions[MAX_REGIONS];
int regions_top;

/* What the 64 bytes of an IPC handle hold. */
struct ipc {
    char mark[8];
    uint64_t id, bytes;
    pid_t pid;
    int gpu, first, is_restored;
};
_Static_assert(sizeof(struct ipc) <= sizeof(CUipcMemHandle), "it has to fit");

/* ---- blocks and regions ------------------------------------------------------------------------------------------ */

struct region *region_at(uint64_t va) {
    struct region *found = NULL;
    for (int i = 0; i < regions_top; i++) {
        struct region *one = &regions[i];
        if (one->kind == REGION_FREE || va < one->va || va >= one->va + one->bytes) continue;
        if (!found || one->kind != REGION_RESERVED) found = one; /* what is mapped lies over what is reserved */
    }
    return found;
}

struct region *region_add(enum region_kind kind, uint64_t va, uint64_t bytes, struct block *block) {
    int place = 0;
    while (place < regions_top && regions[place].kind != REGION_FREE) place++;
    if (place == MAX_REGIONS) abort();
    if (place == regions_top) regions_top++;
    regions[place] = (struct region){kind, va, bytes, block, kind == REGION_ALLOC || kind == REGION_IPC};
    if (block) block->maps++;
    return &regions[place];
}

static void region_remove(struct region *region) {
    struct block *block = region->block;
    memset(region, 0, sizeof *region);
    while (regions_top && regions[regions_top - 1].kind == REGION_FREE) regions_top--;
    if (block) {
        block->maps--;
        block_put(block);
    }
}

struct block *block_add(uint64_t id, uint64_t bytes, int gpu, int fd) {
    int place = 0;
    while (place < MAX_BLOCKS && blocks[place].id) place++;
    if (place == MAX_BLOCKS) abort();
    blocks[place] = (struct block){.id = id, .bytes = bytes, .counts_as = gpu, .gpu = gpu, .fd = fd};
    return &blocks[place];
}

void block_put(struct block *block) {
    if (block->handles || block->maps) return;
    if (block->fd >= 0) close(block->fd);
    node_lock();
    if (!block->is_foreign) node_drop_piece(block->id);
    node_unlock();
    memset(block, 0, sizeof *block);
}

/* At `va`, or anywhere for 0. The mapping keeps the open file, and so the memory, whatever becomes of the descriptor. */
static uint64_t map_file(int fd, uint64_t va, uint64_t bytes, int protection) {
    void *at = mmap((void *)va, bytes, protection, MAP_SHARED | MAP_NORESERVE | (va ? MAP_FIXED : 0), fd, 0);
    if (at == MAP_FAILED) return 0;
    madvise(at, bytes, MADV_DONTFORK); /* a forked child has no part in it */
    madvise(at, bytes, MADV_RANDOM);   /* what is around a page that is touched may be a hole, and stays one */
    return (uint64_t)at;
}

static void map_nothing(uint64_t va, uint64_t bytes) {
    mmap((void *)va, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static CUresult make_block(int gpu, uint64_t bytes, struct block **made) {
    uint64_t id = 0, total = scenario_facts().gpus[gpu].bytes;
    int fd = -1;
    node_lock();
    if (node_used_bytes(gpu) + bytes <= total) fd = node_make_piece(gpu, bytes, &id);
    node_unlock();
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = block_add(id, bytes, gpu, fd);
    return CUDA_SUCCESS;
}

/* ---- plain allocations ------------------------------------------------------------------------------------------- */

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    ENTER_ABOUT(current_context ? current_context->gpu : -1);
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct block *block;
    CUresult made = make_block(current_context->gpu, (bytes + SMALLEST - 1) / SMALLEST * SMALLEST, &block);
    if (made) LEAVE(made);
    *pointer = map_file(block->fd, 0, block->bytes, PROT_READ | PROT_WRITE);
    if (!*pointer) abort();
    close(block->fd);
    block->fd = -1;
    region_add(REGION_ALLOC, *pointer, block->bytes, block);
    LEAVE(CUDA_SUCCESS);
}

static CUresult drop_region(CUdeviceptr pointer, enum region_kind kind) {
    struct region *region = region_at(pointer);
    if (!region || region->kind != kind || region->va != pointer) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)region->va, region->bytes);
    region_remove(region);
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER();
    LEAVE(pointer ? drop_region(pointer, REGION_ALLOC) : CUDA_SUCCESS);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER();
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    *total_bytes = scenario_facts().gpus[current_context->gpu].bytes;
    node_lock();
    *free_bytes = *total_bytes - node_used_bytes(current_context->gpu);
    node_unlock();
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
    ENTER();
    struct region *region = region_at(pointer);
    if (!region) LEAVE(CUDA_ERROR_NOT_FOUND);
    if (base) *base = region->va;
    if (bytes) *bytes = region->bytes;
    LEAVE(CUDA_SUCCESS);
}

/* Of CUpointer_attribute: the kind of memory (2: a device's) and the device's ordinal. */
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr pointer) {
    ENTER();
    struct region *region = region_at(pointer);
    if (!region || !region->block) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (attribute == 2)
        *(unsigned int *)value = 2;
    else if (attribute == 9) {
        for (int i = 0; i < context_count; i++)
            if (contexts[i].gpu == region->block->counts_as) *(int *)value = i;
    } else
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    LEAVE(CUDA_SUCCESS);
}

/* ---- handles of other processes ---------------------------------------------------------------------------------- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER();
    struct region *region = region_at(pointer);
    if (!region || region->kind != REGION_ALLOC) LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct ipc ipc = {"hegmipc", region->block->id, region->block->bytes, getpid(), region->block->gpu, region->block->gpu,
                      region->block->is_restored};
    for (int i = 0; i < context_count; i++)
        if (contexts[i].gpu == ipc.gpu) ipc.first = contexts[i].first;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ipc, sizeof ipc);
    node_lock();
    node_share_piece(region->block->id);
    node_unlock();
    LEAVE(CUDA_SUCCESS);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    struct ipc ipc;
    memcpy(&ipc, &handle, sizeof ipc);
    ENTER_ABOUT(ipc.gpu);
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (flags != 1 || strcmp(ipc.mark, "hegmipc")) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (ipc.pid == getpid()) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!process_has_free(current_context->gpu, scenario_facts().open_bytes)) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    struct node_piece piece;
    node_lock();
    int fd = node_hold_piece(ipc.id, &piece);
    node_unlock();
    if (fd < 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (ipc.is_restored) { /* a handle is given for it, and nobody can open that (580.159.04) */
        close(fd);
        LEAVE(CUDA_ERROR_NOT_PERMITTED);
    }
    struct block *block = block_add(ipc.id, piece.bytes, piece.gpu, -1);
    block->is_foreign = 1;
    block->counts_as = ipc.first;
    *pointer = map_file(fd, 0, piece.bytes, PROT_READ | PROT_WRITE);
    close(fd);
    region_add(REGION_IPC, *pointer, piece.bytes, block);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER();
    LEAVE(drop_region(pointer, REGION_IPC));
}

/* ---- memory as handles, and addresses to map it at --------------------------------------------------------------- */

static struct block *block_of(CUmemGenericAllocationHandle handle) {
    struct block *block = (struct block *)handle;
    return block >= blocks && block < blocks + MAX_BLOCKS && block->handles ? block : NULL;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option) {
    ENTER();
    (void)prop, (void)option;
    *bytes = GRANULARITY;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, uint64_t flags) {
    int ordinal = prop->location.id;
    int is_known = prop->location.type == TYPE_DEVICE && ordinal >= 0 && ordinal < context_count;
    ENTER_ABOUT(is_known ? contexts[ordinal].gpu : -1);
    if (!is_known || prop->type != 1 || flags || !bytes || bytes % GRANULARITY) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (bytes > scenario_facts().gpus[contexts[ordinal].gpu].bytes) LEAVE(CUDA_ERROR_INVALID_VALUE); /* not 2 */
    process_answer();
    struct block *block;
    CUresult made = make_block(contexts[ordinal].gpu, bytes, &block);
    if (made) LEAVE(made);
    block->handles = 1;
    *handle = (CUmemGenericAllocationHandle)block;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    struct block *block = block_of(handle);
    if (!block) LEAVE(CUDA_ERROR_INVALID_VALUE);
    block->handles--;
    block_put(block);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle, int type, uint64_t flags) {
    ENTER();
    struct block *block = block_of(handle);
    if (!block || type != TYPE_DESCRIPTOR || flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(block->fd, F_DUPFD_CLOEXEC, 0); /* the same open file, which so holds the memory by itself */
    if (fd < 0) LEAVE(CUDA_ERROR_OPERATING_SYSTEM);
    node_lock();
    node_share_piece(block->id);
    node_unlock();
    *(int *)shared = fd;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, int type) {
    ENTER();
    struct node_piece piece;
    node_lock();
    uint64_t id = type == TYPE_DESCRIPTOR ? node_piece_of((int)(intptr_t)shared) : 0;
    int other = id ? node_hold_piece(id, &piece) : -1;
    node_unlock();
    if (other >= 0) close(other);
    int fd = other < 0 ? -1 : fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct block *block = block_add(id, piece.bytes, piece.gpu, fd);
    block->is_foreign = 1;
    block->handles = 1;
    *handle = (CUmemGenericAllocationHandle)block;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemAddressReserve(CUdeviceptr *va, size_t bytes, size_t alignment, CUdeviceptr wanted, uint64_t flags) {
    ENTER();
    (void)wanted;
    if (!bytes || bytes % GRANULARITY || flags || alignment > GRANULARITY) LEAVE(CUDA_ERROR_INVALID_VALUE);
    char *at = mmap(NULL, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    char *aligned = (char *)(((uint64_t)at + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
    if (aligned > at) munmap(at, (size_t)(aligned - at));
    munmap(aligned + bytes, GRANULARITY - (size_t)(aligned - at));
    *va = (CUdeviceptr)aligned;
    region_add(REGION_RESERVED, *va, bytes, NULL);
    LEAVE(CUDA_SUCCESS);
}

/* How much of the range is mapped. */
static uint64_t mapped_bytes(uint64_t va, uint64_t bytes) {
    uint64_t mapped = 0;
    for (int i = 0; i < regions_top; i++)
        if (regions[i].kind == REGION_MAPPED && regions[i].va >= va && regions[i].va + regions[i].bytes <= va + bytes)
            mapped += regions[i].bytes;
    return mapped;
}

static struct region *reserved_around(uint64_t va, uint64_t bytes) {
    for (int i = 0; i < regions_top; i++)
        if (regions[i].kind == REGION_RESERVED && regions[i].va <= va && va + bytes <= regions[i].va + regions[i].bytes)
            return &regions[i];
    return NULL;
}

CUresult cuMemAddressFree(CUdeviceptr va, size_t bytes) {
    ENTER();
    struct region *region = reserved_around(va, bytes);
    if (!region || region->va != va || region->bytes != bytes || mapped_bytes(va, bytes)) LEAVE(CUDA_ERROR_INVALID_VALUE);
    munmap((void *)va, bytes);
    region_remove(region);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr va, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, uint64_t flags) {
    ENTER();
    struct block *block = block_of(handle);
    struct region *under = region_at(va);
    if (!block || flags || offset || bytes != block->bytes || !reserved_around(va, bytes) || !under ||
        under->kind == REGION_MAPPED || mapped_bytes(va, bytes))
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!map_file(block->fd, va, bytes, PROT_NONE)) abort();
    region_add(REGION_MAPPED, va, bytes, block);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr va, size_t bytes) {
    ENTER();
    if (mapped_bytes(va, bytes) != bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (int i = regions_top - 1; i >= 0; i--) {
        struct region *one = &regions[i];
        if (one->kind != REGION_MAPPED || one->va < va || one->va + one->bytes > va + bytes) continue;
        map_nothing(one->va, one->bytes);
        region_remove(one);
    }
    LEAVE(CUDA_SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr va, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    ENTER();
    if (mapped_bytes(va, bytes) != bytes || !count) LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type != TYPE_DEVICE || access[i].location.id < 0 ||
            access[i].location.id >= context_count || access[i].flags != 3)
            LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < regions_top; i++) {
        struct region *one = &regions[i];
        if (one->kind != REGION_MAPPED || one->va < va || one->va + one->bytes > va + bytes) continue;
        mprotect((void *)one->va, one->bytes, PROT_READ | PROT_WRITE);
        one->is_accessible = 1;
    }
    LEAVE(CUDA_SUCCESS);
}

/* ---- checkpoint and restore -------------------------------------------------------------------------------------- */

static void *save_content(int fd, uint64_t bytes) {
    char *saved = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (saved == MAP_FAILED) abort();
    off_t at = 0, end;
    while ((at = lseek(fd, at, SEEK_DATA)) >= 0) { /* only what was ever written: the rest is zero on both sides */
        end = lseek(fd, at, SEEK_HOLE);
        for (ssize_t got; at < end; at += got)
            if ((got = pread(fd, saved + at, (size_t)(end - at), at)) <= 0) abort();
    }
    return saved;
}

static void put_content(int fd, const char *saved, uint64_t bytes) {
    static const char zeros[CHUNK];
    for (uint64_t at = 0; at < bytes; at += CHUNK) {
        size_t part = bytes - at < CHUNK ? bytes - at : CHUNK;
        if (memcmp(saved + at, zeros, part) && pwrite(fd, saved + at, part, (off_t)at) != (ssize_t)part) abort();
    }
}

/* Memory of other processes: the checkpoint goes well, and no restore after it (measured with 580.159.04: error 1, the
 * state stays checkpointed). */
static int has_foreign(void) {
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (blocks[i].id && blocks[i].is_foreign) return 1;
    return 0;
}

CUresult memory_save(void) {
    for (int i = 0; i < MAX_BLOCKS; i++) {
        struct block *block = &blocks[i];
        struct node_piece piece;
        if (!block->id || block->is_foreign) continue;
        node_lock();
        int fd = node_hold_piece(block->id, &piece);
        node_unlock();
        block->saved = save_content(fd, block->bytes);
        close(fd);
        for (int j = 0; j < regions_top; j++)
            if (regions[j].block == block) map_nothing(regions[j].va, regions[j].bytes);
        if (block->fd >= 0) close(block->fd);
        node_lock();
        node_drop_piece(block->id);
        node_unlock();
    }
    return CUDA_SUCCESS;
}

/* Under the node's lock: takes the room for everything at once, or nothing. */
static CUresult reserve(struct node_process *self, const int *map, int *fds) {
    struct facts facts = scenario_facts();
    uint64_t need[NODE_GPUS] = {0}, contexts_bytes[NODE_GPUS] = {0};
    for (int gpu = 0; gpu < facts.gpu_count; gpu++) contexts_bytes[map[gpu]] += self->context_bytes[gpu];
    for (int gpu = 0; gpu < facts.gpu_count; gpu++)
        need[gpu] = contexts_bytes[gpu] + (contexts_bytes[gpu] ? facts.restore_bytes : 0);
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (blocks[i].id) need[map[blocks[i].gpu]] += blocks[i].bytes;
    for (int gpu = 0; gpu < facts.gpu_count; gpu++)
        if (need[gpu] && node_used_bytes(gpu) + need[gpu] > facts.gpus[gpu].bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (blocks[i].id) fds[i] = node_make_piece(map[blocks[i].gpu], blocks[i].bytes, &blocks[i].id);
    memcpy(self->context_bytes, contexts_bytes, sizeof contexts_bytes);
    self->is_out = 0;
    return CUDA_SUCCESS;
}

CUresult memory_restore(const int *map) {
    static int fds[MAX_BLOCKS];
    if (has_foreign()) return CUDA_ERROR_INVALID_VALUE;
    node_lock();
    CUresult taken = reserve(node_find(getpid()), map, fds);
    node_unlock();
    if (taken) return taken;
    for (int i = 0; i < MAX_BLOCKS; i++) {
        struct block *block = &blocks[i];
        if (!block->id) continue;
        put_content(fds[i], block->saved, block->bytes);
        munmap(block->saved, block->bytes);
        block->saved = NULL;
        block->gpu = map[block->gpu];
        block->is_restored = 1;
        for (int j = 0; j < regions_top; j++)
            if (regions[j].block == block)
                map_file(fds[i], regions[j].va, regions[j].bytes, regions[j].is_accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
        if (block->fd >= 0)
            block->fd = fds[i];
        else
            close(fds[i]);
    }
    return CUDA_SUCCESS;
}
