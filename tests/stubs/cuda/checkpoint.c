/* The caller's side of the process checkpoint calls: who may, who is there, and the request in the target's mailbox.
 *
 * The target does the step by itself (process.c). So a caller that is killed leaves a step that goes on, the next one
 * waits for that, and a stopped target lets everybody wait: as the real driver does (facts 1.13, 580.159.04).
 */
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

static const struct timespec LOOK_AGAIN = {0, 20 * 1000000L};

/* Under the node's lock: the process as a target, or why it is none. */
static CUresult find_target(pid_t pid, struct node_process **found) {
    char path[32], state = 0;
    struct stat owner;
    snprintf(path, sizeof path, "/proc/%d", (int)pid);
    if (pid <= 0 || !node_start_ticks(pid, &state) || state == 'Z' || stat(path, &owner)) return CUDA_ERROR_OPERATING_SYSTEM;
    if (geteuid() && geteuid() != owner.st_uid) return CUDA_ERROR_OPERATING_SYSTEM;
    *found = node_find(pid);
    if (*found) node_revive(*found);
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

/* Waits until the target has answered request `number`; 0 when it died first. */
static int wait_answered(struct node_process *target, pid_t pid, uint64_t start_ticks, uint32_t number) {
    for (;;) {
        uint32_t answered = __atomic_load_n(&target->answered, __ATOMIC_SEQ_CST);
        if ((int32_t)(answered - number) >= 0) return 1;
        if (!node_lives(pid, start_ticks)) return 0;
        syscall(SYS_futex, &target->answered, FUTEX_WAIT, answered, &LOOK_AGAIN, NULL, 0);
    }
}

static CUresult ask(pid_t pid, enum ask what, unsigned int timeout_ms, const int *map, int *answer) {
    struct node_process *target;
    uint32_t number;
    uint64_t start_ticks;
    for (;;) {
        node_lock();
        CUresult found = find_target(pid, &target);
        if (found) return node_unlock(), found;
        start_ticks = target->start_ticks;
        number = target->asked;
        if (number == target->answered) break;
        node_unlock();
        if (!wait_answered(target, pid, start_ticks, number)) return CUDA_ERROR_OPERATING_SYSTEM;
    }
    target->ask = what;
    target->timeout_ms = timeout_ms;
    target->has_map = map != NULL;
    if (map) memcpy(target->map, map, sizeof target->map);
    __atomic_store_n(&target->asked, ++number, __ATOMIC_SEQ_CST);
    node_unlock();
    syscall(SYS_futex, &target->asked, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    if (!wait_answered(target, pid, start_ticks, number)) return CUDA_ERROR_OPERATING_SYSTEM;
    *answer = target->results[number % 8];
    return CUDA_SUCCESS;
}

static CUresult order(pid_t pid, enum ask what, unsigned int timeout_ms, const int *map) {
    int result = 0;
    CUresult asked = ask(pid, what, timeout_ms, map, &result);
    return asked ? asked : (CUresult)result;
}

/* None of these needs a context, all need cuInit. They do not take the process's guard: other calls go on meanwhile. */
#define ASK(pid, what)                                        \
    do {                                                      \
        CUresult entered = process_enter(__func__, pid, 1);   \
        if (!entered) entered = (what);                       \
        process_leave();                                      \
        return entered;                                       \
    } while (0)

CUresult cuCheckpointProcessGetState(int pid, int *state) {
    ASK(pid, ask(pid, ASK_STATE, 0, NULL, state));
}

static CUresult find_thread(pid_t pid, int *thread) {
    struct node_process *target;
    node_lock();
    CUresult found = find_target(pid, &target);
    if (!found) *thread = target->thread;
    node_unlock();
    return found;
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *thread) {
    ASK(pid, find_thread(pid, thread));
}

CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args) {
    ASK(pid, order(pid, ASK_LOCK, args ? args->timeoutMs : 0, NULL));
}

CUresult cuCheckpointProcessCheckpoint(int pid, const void *args) {
    (void)args;
    ASK(pid, order(pid, ASK_CHECKPOINT, 0, NULL));
}

CUresult cuCheckpointProcessUnlock(int pid, const void *args) {
    (void)args;
    ASK(pid, order(pid, ASK_UNLOCK, 0, NULL));
}

static int gpu_of(const struct facts *facts, const CUuuid *uuid, int was) {
    for (int i = 0; i < facts->gpu_count; i++)
        if (!memcmp(was ? &facts->gpus[i].was : &facts->gpus[i].uuid, uuid, sizeof *uuid)) return i;
    return -1;
}

/* Every GPU of the node once on either side, whatever the caller or the target sees of them; chips as they were. */
static CUresult read_map(const CUcheckpointRestoreArgs *args, int *map) {
    struct facts facts = scenario_facts();
    int taken[NODE_GPUS] = {0};
    for (int i = 0; i < NODE_GPUS; i++) map[i] = -1;
    if (!args->gpuPairs || args->gpuPairsCount != (unsigned int)facts.gpu_count) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < args->gpuPairsCount; i++) {
        int from = gpu_of(&facts, &args->gpuPairs[i].oldUuid, 1), to = gpu_of(&facts, &args->gpuPairs[i].newUuid, 0);
        if (from < 0 || to < 0 || map[from] >= 0 || taken[to]++) return CUDA_ERROR_INVALID_VALUE;
        if (strcmp(facts.gpus[from].chip, facts.gpus[to].chip)) return CUDA_ERROR_INVALID_VALUE; /* not measured */
        map[from] = to;
    }
    return CUDA_SUCCESS;
}

static CUresult restore(int pid, const CUcheckpointRestoreArgs *args) {
    int map[NODE_GPUS], state;
    CUresult found = ask(pid, ASK_STATE, 0, NULL, &state);
    if (found) return found;
    if ((!args || !args->gpuPairsCount) && scenario_facts().is_another_node) return CUDA_ERROR_INVALID_VALUE; /* not measured */
    if (!args || !args->gpuPairsCount) return order(pid, ASK_RESTORE, 0, NULL);
    found = read_map(args, map);
    return found ? found : order(pid, ASK_RESTORE, 0, map);
}

CUresult cuCheckpointProcessRestore(int pid, const CUcheckpointRestoreArgs *args) {
    ASK(pid, restore(pid, args));
}
