/* What the stub is to answer, read from the file that HEGM_AMDSMI_SCENARIO names.
 *
 * The file is looked at before every call and read again when it was replaced, so that a test can change the node while
 * the binding runs. scenario.py writes it and says what each line means. Nothing here knows AMD SMI's functions.
 */
#ifndef HEGM_STUB_SCENARIO_H
#define HEGM_STUB_SCENARIO_H

#include <stdint.h>

enum { MAX_GPUS = 16, MAX_FACTS = 32, MAX_ORDERS = 64, MAX_PROCESSES = 4096 };

struct fact {
    char key[32], value[128];
};

struct link {
    char kind[8];
    uint64_t mb_per_s;
    uint32_t lanes;
};

struct gpu {
    struct fact facts[MAX_FACTS];
    int fact_count;
    long lost_after, calls;
    struct link links[MAX_GPUS];
};

struct process {
    int gpu;
    uint32_t pid;
    uint64_t bytes;
    char name[64];
};

/* What is to happen to a call: `what` is error, hang or hold. gpu is -1 for a call about any GPU. */
struct order {
    char what[8], function[96], argument[1024];
    int gpu;
};

struct scenario {
    uint32_t version[3];
    char driver_version[64], log[1024];
    int has_driver, gpu_count, order_count, process_count;
    struct gpu gpus[MAX_GPUS];
    struct order orders[MAX_ORDERS];
    struct process processes[MAX_PROCESSES];
};

extern struct scenario scenario;

/* Brings the scenario up to date, counts and logs the call, and does what is ordered for it: waits, or gives back a
 * status. 0 means that the call goes on. */
int scenario_enter(const char *function, int gpu);

/* Whether the GPU is off the bus by now. */
int scenario_lost(int gpu);

/* The value of that key for the GPU, or NULL. */
const char *scenario_text(int gpu, const char *key);

/* The same as a number, in any notation of C; all ones where there is none. */
uint64_t scenario_number(int gpu, const char *key);

#endif
