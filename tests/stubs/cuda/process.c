/* This process's side of the driver: cuInit, devices, contexts, the gate, and the thread that does what others ask of
 * this process through its mailbox. See process.h. */
#define _GNU_SOURCE /* for the lock that prefers writers */
#include "process.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct context contexts[NODE_GPUS];
int context_count;
pthread_mutex_t process_guard = PTHREAD_MUTEX_INITIALIZER;
_Thread_local CUcontext current_context;

static int is_initialised, is_forked, is_answering;
static int state = RUNNING, is_lost, was_connected; /* the driver thread's own */
static int was_restored;
static struct node_process *mailbox;

/* Writers first: a locked-out call would otherwise wait for calls that come later than itself. */
static pthread_rwlock_t gate = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static pthread_mutex_t work_guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_done = PTHREAD_COND_INITIALIZER;
static int work;

/* ---- the gate ---------------------------------------------------------------------------------------------------- */

CUresult process_enter(const char *function, long subject, int needs_init) {
    pthread_rwlock_rdlock(&gate);
    CUresult ordered = scenario_enter(function, subject);
    if (ordered) return ordered;
    return needs_init && (!is_initialised || is_forked) ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

void process_leave(void) {
    pthread_rwlock_unlock(&gate);
}

void process_work(int change) {
    pthread_mutex_lock(&work_guard);
    work += change;
    pthread_cond_broadcast(&work_done);
    pthread_mutex_unlock(&work_guard);
}

int process_shut(const struct timespec *deadline) {
    int late = deadline ? pthread_rwlock_timedwrlock(&gate, deadline) : pthread_rwlock_wrlock(&gate);
    if (late) return 0;
    pthread_mutex_lock(&work_guard);
    while (work && !late)
        late = deadline ? pthread_cond_timedwait(&work_done, &work_guard, deadline)
                        : pthread_cond_wait(&work_done, &work_guard);
    pthread_mutex_unlock(&work_guard);
    if (late) pthread_rwlock_unlock(&gate);
    return !late;
}

void process_open(void) {
    pthread_rwlock_unlock(&gate);
}

/* ---- what others ask of this process ----------------------------------------------------------------------------- */

static CUresult step_lock(unsigned int timeout_ms) {
    if (state != RUNNING) return CUDA_ERROR_ILLEGAL_STATE;
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += timeout_ms % 1000 * 1000000L;
    if (deadline.tv_nsec >= 1000000000L) deadline.tv_sec++, deadline.tv_nsec -= 1000000000L;
    if (!process_shut(timeout_ms ? &deadline : NULL)) return CUDA_ERROR_NOT_READY;
    state = LOCKED;
    return CUDA_SUCCESS;
}

int process_has_free(int gpu, uint64_t bytes) {
    struct facts facts = scenario_facts();
    node_lock();
    int has = node_used_bytes(gpu) + bytes <= facts.gpus[gpu].bytes;
    node_unlock();
    return has;
}

/* Whether it has communicators with other ranks: who plays these keeps a file with the pid as its name. */
static int has_communicators(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/communicators/%d", node_folder(), (int)getpid());
    return !access(path, F_OK);
}

/* Without memory for itself on a GPU of the process it answers 999, and the process stays locked (580.159.04). */
static CUresult step_checkpoint(void) {
    if (state != LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    for (int i = 0; i < context_count; i++)
        if (contexts[i].users && !process_has_free(contexts[i].gpu, scenario_facts().checkpoint_bytes))
            return CUDA_ERROR_UNKNOWN;
    CUresult saved = memory_save();
    if (saved) return saved;
    was_connected = has_communicators();
    node_lock();
    mailbox->is_out = mailbox->was_out = 1;
    node_unlock();
    state = CHECKPOINTED;
    return CUDA_SUCCESS;
}

/* Whether any of its contexts may reach another one's memory, with which nobody is brought back. */
static int has_peers(void) {
    for (int i = 0; i < context_count; i++)
        if (contexts[i].users && contexts[i].peers) return 1;
    return 0;
}

/* A restore that fails for want of room, or because there was peer-to-peer memory, cannot be had again: the job is lost. */
static CUresult step_restore(const int *map) {
    if (is_lost) return CUDA_ERROR_OPERATING_SYSTEM;
    if (state != CHECKPOINTED) return CUDA_ERROR_ILLEGAL_STATE;
    char pid[16];
    long code;
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    int is_doomed = scenario_has("nccl_p2p", pid, -1, &code) || scenario_has("lose", "step:restore", getpid(), &code);
    if (!is_doomed && was_connected) {
        is_doomed = 1;
        code = 0;
    }
    CUresult restored = is_doomed     ? (code ? (CUresult)code : CUDA_ERROR_NOT_SUPPORTED)
                        : has_peers() ? CUDA_ERROR_INVALID_VALUE
                                      : memory_restore(map);
    is_lost = is_doomed || has_peers() || restored == CUDA_ERROR_OUT_OF_MEMORY;
    if (restored) return restored;
    was_restored = 1;
    for (int i = 0; i < context_count; i++) contexts[i].gpu = map[contexts[i].gpu];
    state = LOCKED;
    return CUDA_SUCCESS;
}

static CUresult step_unlock(void) {
    if (state != LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    state = RUNNING;
    process_open();
    return CUDA_SUCCESS;
}

/* The state is an answer like a result; all else is a CUDA code. */
static int step(int ask, unsigned int timeout_ms, const int *map) {
    static const char *names[] = {"", "step:state", "step:lock", "step:checkpoint", "step:restore", "step:unlock"};
    CUresult ordered = scenario_enter(names[ask], getpid());
    if (ask == ASK_STATE) return scenario_has("fail", names[ask], getpid(), NULL) ? FAILED : state;
    if (ordered) return ordered;
    pthread_mutex_t *guard = ask == ASK_LOCK ? NULL : &process_guard; /* a lock waits for calls, which need the guard */
    if (guard) pthread_mutex_lock(guard);
    CUresult result = ask == ASK_LOCK         ? step_lock(timeout_ms)
                      : ask == ASK_CHECKPOINT ? step_checkpoint()
                      : ask == ASK_RESTORE    ? step_restore(map)
                                              : step_unlock();
    if (guard) pthread_mutex_unlock(guard);
    return result;
}

static void *answer(void *unused) {
    (void)unused;
    mailbox->thread = (pid_t)syscall(SYS_gettid);
    for (;;) {
        uint32_t asked = __atomic_load_n(&mailbox->asked, __ATOMIC_SEQ_CST);
        if (asked == mailbox->answered) {
            syscall(SYS_futex, &mailbox->asked, FUTEX_WAIT, asked, NULL, NULL, 0);
            continue;
        }
        node_lock();
        int ask = mailbox->ask, map[NODE_GPUS];
        unsigned int timeout_ms = mailbox->timeout_ms;
        for (int i = 0; i < NODE_GPUS; i++) map[i] = mailbox->has_map ? mailbox->map[i] : i;
        node_unlock();
        int result = step(ask, timeout_ms, map);
        node_lock();
        mailbox->results[asked % 8] = result;
        __atomic_store_n(&mailbox->answered, asked, __ATOMIC_SEQ_CST);
        node_unlock();
        syscall(SYS_futex, &mailbox->answered, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    return NULL;
}

/* Under process_guard. */
void process_answer(void) {
    if (is_answering) return;
    node_lock();
    mailbox = node_join();
    node_unlock();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    pthread_t thread;
    is_answering = !pthread_create(&thread, NULL, answer, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_answering) pthread_detach(thread);
}

/* ---- the library and its devices --------------------------------------------------------------------------------- */

static void after_fork(void) {
    is_forked = 1;
}

static int by_name(const struct facts *facts, const char *word) {
    if (strncmp(word, "GPU-", 4)) {
        char *end;
        long index = strtol(word, &end, 10);
        return end != word && index >= 0 && index < facts->gpu_count ? (int)index : -1;
    }
    for (int i = 0; i < facts->gpu_count; i++) {
        char text[64] = "GPU-", *to = text + 4;
        for (int b = 0; b < 16; b++)
            to += sprintf(to, b == 4 || b == 6 || b == 8 || b == 10 ? "-%02x" : "%02x", facts->gpus[i].uuid.bytes[b]);
        if (!strncmp(text, word, strlen(word))) return i;
    }
    return -1;
}

/* As the real one: in the order given, and nothing from the first bad word on. */
static void choose_devices(const struct facts *facts) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int chosen[NODE_GPUS], count = 0;
    if (!visible)
        for (; count < facts->gpu_count; count++) chosen[count] = count;
    else {
        char words[512], *rest = words, *word;
        snprintf(words, sizeof words, "%s", visible);
        while (count < NODE_GPUS && (word = strsep(&rest, ","))) {
            int gpu = by_name(facts, word);
            if (gpu < 0) break;
            chosen[count++] = gpu;
        }
    }
    for (int i = 0; i < count; i++)
        contexts[i] = (struct context){.ordinal = i, .gpu = chosen[i], .first = chosen[i]};
    context_count = count;
}

CUresult cuInit(unsigned int flags) {
    CUresult entered = process_enter(__func__, -1, 0);
    if (!entered && flags) entered = CUDA_ERROR_INVALID_VALUE;
    if (!entered && is_forked) entered = CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&process_guard);
    if (!entered && !is_initialised) {
        struct facts facts = scenario_facts();
        choose_devices(&facts);
        if (!context_count)
            entered = CUDA_ERROR_NO_DEVICE;
        else
            is_initialised = !pthread_atfork(NULL, NULL, after_fork);
    }
    LEAVE(entered);
}

CUresult cuDriverGetVersion(int *version) {
    *version = scenario_facts().driver_version;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER();
    *count = context_count;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    *device = ordinal;
    LEAVE(ordinal >= 0 && ordinal < context_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

static int is_device(CUdevice device) {
    return device >= 0 && device < context_count;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER();
    if (is_device(device)) *uuid = scenario_facts().gpus[contexts[device].gpu].uuid; /* after a move, the new one's */
    LEAVE(is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER();
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", scenario_facts().gpus[contexts[device].gpu].name);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuDeviceGetPCIBusId(char *address, int length, CUdevice device) {
    ENTER();
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    struct gpu gpu = scenario_facts().gpus[contexts[device].gpu];
    snprintf(address, (size_t)length, "%04X:%02X:%02X.0", gpu.domain, gpu.bus, gpu.device);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER();
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *bytes = scenario_facts().gpus[contexts[device].gpu].bytes;
    LEAVE(CUDA_SUCCESS);
}

/* Those that somebody asks for; the numbers are CUdevice_attribute's. */
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER();
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    struct gpu gpu = scenario_facts().gpus[contexts[device].gpu];
    switch (attribute) {
        case 33: *value = gpu.bus; break;
        case 34: *value = gpu.device; break;
        case 40: *value = 3; break;  /* copy engines */
        case 41: *value = 1; break;  /* unified addressing */
        case 50: *value = gpu.domain; break;
        case 75: *value = 9; break;  /* compute capability */
        case 76: *value = 0; break;
        case 102: *value = 1; break; /* virtual memory management */
        case 103: *value = 1; break; /* memory handles by descriptor */
        default: LEAVE(CUDA_ERROR_INVALID_VALUE);
    }
    LEAVE(CUDA_SUCCESS);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER();
    if (!is_device(device) || !is_device(peer)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *can = contexts[device].gpu != contexts[peer].gpu;
    LEAVE(CUDA_SUCCESS);
}

/* ---- contexts ---------------------------------------------------------------------------------------------------- */

static CUresult open_context(struct context *context) {
    struct facts facts = scenario_facts();
    process_answer();
    struct node *node = node_lock();
    CUresult opened = node ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    if (node_used_bytes(context->gpu) + facts.context_bytes > facts.gpus[context->gpu].bytes)
        opened = CUDA_ERROR_OUT_OF_MEMORY;
    else
        mailbox->context_bytes[context->gpu] += facts.context_bytes, context->stack_bytes = 1024;
    node_unlock();
    return opened;
}

/* Half of a context's memory is for stacks of this size, and what it is told to keep takes as much more or less. */
enum { USUAL_STACK_BYTES = 1024, LIMIT_STACK_SIZE = 0 };

static uint64_t stacks_bytes(uint64_t stack_bytes) {
    return scenario_facts().context_bytes / 2 / USUAL_STACK_BYTES * stack_bytes;
}

CUresult cuCtxGetLimit(size_t *value, int limit) {
    ENTER();
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (limit != LIMIT_STACK_SIZE) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *value = current_context->stack_bytes;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuCtxSetLimit(int limit, size_t value) {
    ENTER_ABOUT(current_context ? current_context->gpu : -1);
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (limit != LIMIT_STACK_SIZE) LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct facts facts = scenario_facts();
    int gpu = current_context->gpu;
    CUresult set = CUDA_SUCCESS;
    node_lock();
    uint64_t before = stacks_bytes(current_context->stack_bytes), after = stacks_bytes(value);
    if (node_used_bytes(gpu) - before + after > facts.gpus[gpu].bytes) set = CUDA_ERROR_OUT_OF_MEMORY;
    else mailbox->context_bytes[gpu] += after - before, current_context->stack_bytes = value;
    node_unlock();
    LEAVE(set);
}

static void close_context(struct context *context) {
    node_lock();
    mailbox->context_bytes[context->gpu] = 0;
    node_unlock();
    if (current_context == context) current_context = NULL;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER_ABOUT(is_device(device) ? contexts[device].gpu : -1);
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    CUresult opened = contexts[device].users ? CUDA_SUCCESS : open_context(&contexts[device]);
    if (!opened) {
        contexts[device].users++;
        *context = &contexts[device];
    }
    LEAVE(opened);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER();
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (!contexts[device].users) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!--contexts[device].users) close_context(&contexts[device]);
    LEAVE(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active) {
    ENTER();
    if (!is_device(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *flags = 0;
    *is_active = contexts[device].users > 0;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    if (context && !context->users) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    current_context = context;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    *context = current_context;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER();
    if (!current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    *device = current_context->ordinal;
    LEAVE(CUDA_SUCCESS);
}

/* From the current context to the memory of `peer`; refused for good to a process that was restored (580.159.04). */
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    ENTER_ABOUT(peer ? peer->gpu : -1);
    if (!current_context || !peer || !peer->users || peer == current_context) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (was_restored) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (current_context->peers & 1u << peer->ordinal) LEAVE(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    current_context->peers |= 1u << peer->ordinal;
    LEAVE(CUDA_SUCCESS);
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    ENTER();
    if (!current_context || !peer) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!(current_context->peers & 1u << peer->ordinal)) LEAVE(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    current_context->peers &= ~(1u << peer->ordinal);
    LEAVE(CUDA_SUCCESS);
}
