/* What the stub is to answer, read from the file that HEGM_NVML_SCENARIO names.
 *
 * The file is looked at before every call and read again when it was replaced, so that a test can change the node while
 * the binding runs. scenario.py writes it and says what each line means. Nothing here knows NVML's functions.
 */
#ifndef HEGM_STUB_SCENARIO_H
#define HEGM_STUB_SCENARIO_H

#include <stddef.h>

enum { MAX_GPUS = 64, MAX_INSTANCES = 8, MAX_LINKS = 36, MAX_PROCESSES = 8192, MAX_ORDERS = 128, MAX_FACTS = 64 };

/* A GPU, or with instance >= 0 one MIG instance of it. NVML's handles point to these. */
struct device {
    int gpu, instance;
};

struct fact {
    char key[32], value[96];
};

struct link {
    char pci[32];
    unsigned int version;
    int listed, active;
};

struct instance {
    unsigned int gpu_instance, compute_instance;
    int listed;
};

struct gpu {
    struct fact facts[MAX_FACTS];
    int fact_count, link_count;
    struct link links[MAX_LINKS];
    struct instance instances[MAX_INSTANCES];
    long lost_after, calls;
};

struct process {
    int gpu;
    char list[12];
    unsigned int pid, gpu_instance, compute_instance;
    unsigned long long bytes;
};

/* What is to happen to a call: `what` is error, hang, hold or delay. */
struct order {
    char what[32], function[96], fifo[1024];
    int gpu, instance;
    long number;
};

struct xid {
    long sequence;
    int gpu;
    unsigned long long number;
};

struct scenario {
    char driver_version[64], nvml_version[64], log[1024], driver[1024], kept[1024];
    int cuda_version, gpu_count, process_count, order_count, xid_count;
    long epoch;
    unsigned int process_stride;
    struct gpu gpus[MAX_GPUS];
    struct process processes[MAX_PROCESSES];
    struct order orders[MAX_ORDERS];
    struct xid xids[MAX_ORDERS];
    char peers[MAX_GPUS][MAX_GPUS][8];
};

/* Brings the scenario up to date, counts and logs the call, and does what is ordered for it: waits, or gives back an
 * NVML error. 0 means that the call goes on. `device` is NULL for calls that are about no GPU. */
int scenario_enter(const char *function, const struct device *device);

/* A descriptor of the file that stands for /dev/nvidiactl; -1 without one. */
int scenario_open_driver(void);

/* Writes down a descriptor that stays open for good, so that a test can count and close it. */
void scenario_note_kept(int fd);

/* The scenario as it was read last. */
struct scenario *scenario(void);

/* Whether the GPU is off the bus by now. */
int scenario_lost(int gpu);

/* The value of that key for the GPU; NULL where the scenario gives none or N/A. */
const char *scenario_fact(int gpu, const char *key);

#endif
