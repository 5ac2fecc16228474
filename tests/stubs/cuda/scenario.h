/* What the stub is to answer, and what goes wrong: read from the file `scenario` in the folder that HEGM_CUDA_STUB
 * names, and read again when it was replaced. node.py writes it and says what each line means. Nothing here knows
 * CUDA's functions. Any thread may call at any time.
 */
#ifndef HEGM_STUB_CUDA_SCENARIO_H
#define HEGM_STUB_CUDA_SCENARIO_H

#include <stdint.h>

#include "cuda.h"
#include "node.h"

struct gpu {
    CUuuid uuid, was; /* was: of the GPU in its place where processes were checkpointed; the same unless said */
    char name[64];
    int domain, bus, device;
    uint64_t bytes;
    char chip[32];
};

struct facts {
    int gpu_count, driver_version;
    uint64_t context_bytes, restore_bytes; /* of a context; what a restore needs beside the memory itself, for a moment */
    /* What calls need for a moment of what is free: a new stream, opening another's memory, a checkpoint on its GPUs. */
    uint64_t stream_bytes, open_bytes, checkpoint_bytes;
    int is_another_node; /* than processes were checkpointed on */
    struct gpu gpus[NODE_GPUS];
};

/* Notes the call in the log, waits as long as is ordered, and gives back the error that is ordered, or 0. `subject` is
 * the pid or GPU that the call is about, -1 for none. */
int scenario_enter(const char *function, long subject);

/* As scenario_enter, but neither noted nor waited for: only whether there is such an order, and its number. */
int scenario_has(const char *what, const char *function, long subject, long *number);

/* As it is now. */
struct facts scenario_facts(void);

#endif
