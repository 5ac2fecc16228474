/* A libnvidia-ml.so.1 for tests: NVML's own functions and structures, with the answers of a scenario file.
 *
 * The true Python binding is run against it. It answers what the inventory asks for and nothing else: a function that
 * is missing here is missing for the binding too, as in an older library. tests/stubs/build.py can hide more of them.
 */
#include "nvml.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "cuda/node.h"
#include "scenario.h"

static long initialised_epoch = -1;
static int users, driver = -1, kept = -1;
static struct device gpus[MAX_GPUS], instances[MAX_GPUS][MAX_INSTANCES];

static struct {
    int made;
    int registered[MAX_GPUS];
    long delivered;
} events;

static nvmlReturn_t enter(const char *function, nvmlDevice_t device) {
    nvmlReturn_t ordered = scenario_enter(function, device);
    if (ordered) return ordered;
    if (initialised_epoch != scenario()->epoch) return NVML_ERROR_UNINITIALIZED;
    if (!device) return NVML_SUCCESS;
    if (device->gpu >= scenario()->gpu_count) return NVML_ERROR_GPU_IS_LOST;
    return scenario_lost(device->gpu) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

#define ENTER(device)                                \
    do {                                             \
        nvmlReturn_t entered = enter(__func__, device); \
        if (entered) return entered;                 \
    } while (0)

static nvmlReturn_t number(nvmlDevice_t device, const char *key, unsigned long long *value) {
    const char *text = scenario_fact(device->gpu, key);
    if (!text) return NVML_ERROR_NOT_SUPPORTED;
    *value = strtoull(text, NULL, 0);
    return NVML_SUCCESS;
}

static nvmlReturn_t small(nvmlDevice_t device, const char *key, unsigned int *value) {
    unsigned long long wide = 0;
    nvmlReturn_t found = number(device, key, &wide);
    if (!found) *value = (unsigned int)wide;
    return found;
}

static nvmlReturn_t text(nvmlDevice_t device, const char *key, char *value, unsigned int size) {
    const char *found = scenario_fact(device->gpu, key);
    if (!found) return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(found) >= size) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(value, found);
    return NVML_SUCCESS;
}

/* ---- the library and the driver ---------------------------------------------------------------------------------- */

/* As the real one of driver 580: the driver is open while the library is initialised; and the first time makes an
 * eventfd that stays open for good, also when the library is unloaded. */
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    nvmlReturn_t ordered = scenario_enter(__func__, NULL);
    if (ordered) return ordered;
    if (!users++) driver = scenario_open_driver();
    if (kept < 0) scenario_note_kept(kept = eventfd(0, EFD_CLOEXEC));
    initialised_epoch = scenario()->epoch;
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i] = (struct device){i, -1};
        for (int j = 0; j < MAX_INSTANCES; j++) instances[i][j] = (struct device){i, j};
    }
    memset(&events, 0, sizeof events);
    return NVML_SUCCESS;
}

/* Lets go of the driver also when that is gone or the call is ordered to fail: it could do nothing else with it. */
nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t entered = enter(__func__, NULL);
    if (users && !--users) {
        if (driver >= 0) close(driver);
        driver = -1;
        initialised_epoch = -1;
    }
    return entered;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    static char words[32];
    snprintf(words, sizeof words, "Stub error %d", code);
    return words;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    ENTER(NULL);
    snprintf(version, length, "%s", scenario()->driver_version);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    ENTER(NULL);
    snprintf(version, length, "%s", scenario()->nvml_version);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER(NULL);
    *version = scenario()->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER(NULL);
    *count = (unsigned int)scenario()->gpu_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= MAX_GPUS) return NVML_ERROR_INVALID_ARGUMENT;
    ENTER(&gpus[index]);
    *device = &gpus[index];
    return NVML_SUCCESS;
}

/* ---- what a GPU is ----------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    ENTER(device);
    return text(device, "uuid", uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    ENTER(device);
    return text(device, "name", name, length);
}

static void fill_pci(nvmlPciInfo_t *pci, const char *address) {
    memset(pci, 0, sizeof *pci);
    sscanf(address, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER(device);
    const char *address = scenario_fact(device->gpu, "pci");
    if (!address) return NVML_ERROR_NOT_SUPPORTED;
    fill_pci(pci, address);
    return small(device, "device_id", &pci->pciDeviceId);
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture) {
    ENTER(device);
    return small(device, "architecture", architecture);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    ENTER(device);
    const char *capability = scenario_fact(device->gpu, "compute_capability");
    if (!capability || sscanf(capability, "%d.%d", major, minor) != 2) return NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes, unsigned int scope) {
    ENTER(device);
    (void)scope;
    unsigned long long bits = 0;
    nvmlReturn_t found = number(device, "memory_affinity", &bits);
    if (found) return found;
    memset(nodes, 0, size * sizeof *nodes);
    nodes[0] = bits;
    return NVML_SUCCESS;
}

/* ---- links ------------------------------------------------------------------------------------------------------- */

static nvmlReturn_t find_link(nvmlDevice_t device, unsigned int number, struct link **link) {
    struct gpu *gpu = &scenario()->gpus[device->gpu];
    if (!gpu->link_count) return NVML_ERROR_NOT_SUPPORTED;
    if (number >= MAX_LINKS || !gpu->links[number].listed) return NVML_ERROR_INVALID_ARGUMENT;
    *link = &gpu->links[number];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int number, unsigned int *active) {
    ENTER(device);
    struct link *link;
    nvmlReturn_t found = find_link(device, number, &link);
    if (!found) *active = (unsigned int)link->active;
    return found;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int number, unsigned int *version) {
    ENTER(device);
    struct link *link;
    nvmlReturn_t found = find_link(device, number, &link);
    if (!found) *version = link->version;
    return found;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int number, nvmlPciInfo_t *pci) {
    ENTER(device);
    struct link *link;
    nvmlReturn_t found = find_link(device, number, &link);
    if (!found) fill_pci(pci, link->pci);
    return found;
}

/* The scenario's letters for a pair: r read, w write, n NVLink. */
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, unsigned int capability, unsigned int *status) {
    ENTER(a);
    if (capability > 2) return NVML_ERROR_INVALID_ARGUMENT;
    *status = strchr(scenario()->peers[a->gpu][b->gpu], "rwn"[capability]) ? 0 : 5;
    return NVML_SUCCESS;
}

/* ---- how a GPU does ---------------------------------------------------------------------------------------------- */

/* On a node that the stub libcuda shares, what its processes use comes on top. */
static unsigned long long used_through_cuda(const struct device *device) {
    unsigned long long used = 0;
    if (device->gpu < NODE_GPUS && node_lock()) {
        used = node_used_bytes(device->gpu);
        node_unlock();
    }
    return used;
}

static nvmlReturn_t fill_memory(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t found = number(device, "memory_total", &memory->total);
    if (!found) found = number(device, "memory_reserved", &memory->reserved);
    if (!found) found = number(device, "memory_used", &memory->used);
    if (!found) memory->used += used_through_cuda(device);
    if (!found) memory->free = memory->total - memory->reserved - memory->used;
    return found;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER(device);
    nvmlMemory_v2_t whole;
    nvmlReturn_t found = fill_memory(device, &whole);
    if (!found) *memory = (nvmlMemory_t){whole.total, whole.free, whole.used + whole.reserved};
    return found;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER(device);
    if (memory->version != (sizeof *memory | 2u << 24)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return fill_memory(device, memory);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    ENTER(device);
    utilization->memory = 0;
    return small(device, "utilisation", &utilization->gpu);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *temperature) {
    ENTER(device);
    return sensor ? NVML_ERROR_INVALID_ARGUMENT : small(device, "temperature", temperature);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    ENTER(device);
    if (temperature->version != (sizeof *temperature | 1u << 24)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensorType) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int degrees = 0;
    nvmlReturn_t found = small(device, "temperature", &degrees);
    temperature->temperature = (int)degrees;
    return found;
}

#define NUMBER(function, key, type, read)                       \
    nvmlReturn_t function(nvmlDevice_t device, type *value) {   \
        ENTER(device);                                          \
        return read(device, key, value);                        \
    }

NUMBER(nvmlDeviceGetPowerUsage, "power_mw", unsigned int, small)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", unsigned int, small)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", unsigned int, small)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pending", unsigned int, small)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "clocks_event_reasons", unsigned long long, number)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks_event_reasons", unsigned long long, number)

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    ENTER(device);
    nvmlReturn_t found = small(device, "mig", current);
    *pending = *current;
    return found;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    ENTER(device);
    *count = MAX_INSTANCES;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *instance) {
    ENTER(device);
    if (index >= MAX_INSTANCES) return NVML_ERROR_INVALID_ARGUMENT;
    if (!scenario()->gpus[device->gpu].instances[index].listed) return NVML_ERROR_NOT_FOUND;
    *instance = &instances[device->gpu][index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int kind, unsigned int counter,
                                         unsigned long long *count) {
    ENTER(device);
    if (kind > 1 || counter) return NVML_ERROR_INVALID_ARGUMENT;
    return number(device, kind ? "ecc_uncorrected" : "ecc_corrected", count);
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned int cause, unsigned int *count,
                                       unsigned long long *addresses) {
    ENTER(device);
    unsigned int pages = 0;
    nvmlReturn_t found = small(device, cause ? "retired_double_bit" : "retired_single_bit", &pages);
    if (found) return found;
    unsigned int room = *count;
    *count = pages;
    if (room < pages) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < pages; i++) addresses[i] = 0x1000ull * (i + 1);
    return NVML_SUCCESS;
}

/* remapped_rows: CORRECTABLE UNCORRECTABLE PENDING FAILED */
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                                       unsigned int *pending, unsigned int *failed) {
    ENTER(device);
    const char *rows = scenario_fact(device->gpu, "remapped_rows");
    if (!rows || sscanf(rows, "%u %u %u %u", correctable, uncorrectable, pending, failed) != 4)
        return NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "field.%u", values[i].fieldId);
        values[i].valueType = 1;
        values[i].nvmlReturn = small(device, key, &values[i].value.uiVal);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info) {
    ENTER(device);
    if (info->version != (sizeof *info | 2u << 24)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    unsigned int state = 0, status = 0;
    nvmlReturn_t found = small(device, "fabric_state", &state);
    if (!found) found = small(device, "fabric_status", &status);
    info->state = (unsigned char)state;
    info->status = (int)status;
    return found;
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

nvmlReturn_t nvmlEventSetCreate(void **set) {
    ENTER(NULL);
    memset(events.registered, 0, sizeof events.registered);
    events.made = 1;
    *set = &events;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(void *set) {
    ENTER(NULL);
    if (set != &events || !events.made) return NVML_ERROR_INVALID_ARGUMENT;
    events.made = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *set) {
    ENTER(device);
    if (set != &events || !events.made || types != 8) return NVML_ERROR_INVALID_ARGUMENT;
    events.registered[device->gpu] = 1;
    return NVML_SUCCESS;
}

/* As the real one: a lost GPU in the set makes every wait fail at once, whatever the others have to say. */
nvmlReturn_t nvmlEventSetWait_v2(void *set, nvmlEventData_t *data, unsigned int timeout_ms) {
    ENTER(NULL);
    if (set != &events || !events.made || timeout_ms) return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < scenario()->gpu_count; i++)
        if (events.registered[i] && scenario_lost(i)) return NVML_ERROR_GPU_IS_LOST;
    for (int i = 0; i < scenario()->xid_count; i++) {
        const struct xid *xid = &scenario()->xids[i];
        if (xid->sequence <= events.delivered || !events.registered[xid->gpu]) continue;
        events.delivered = xid->sequence;
        *data = (nvmlEventData_t){&gpus[xid->gpu], 8, xid->number, ~0u, ~0u};
        return NVML_SUCCESS;
    }
    return NVML_ERROR_TIMEOUT;
}

/* ---- processes --------------------------------------------------------------------------------------------------- */

static int is_on(const struct process *process, const char *list, const struct device *device) {
    if (process->gpu != device->gpu || strcmp(process->list, list)) return 0;
    if (device->instance < 0) return 1;
    const struct instance *instance = &scenario()->gpus[device->gpu].instances[device->instance];
    return instance->gpu_instance == process->gpu_instance && instance->compute_instance == process->compute_instance;
}

/* A list as it is being written: entries of `stride` bytes, as many as there is room for; all are counted. */
struct list {
    char *entries;
    unsigned int room, found, stride;
};

static void add_process(struct list *list, const struct process *process) {
    if (list->found++ >= list->room) return;
    nvmlProcessInfo_longest_t *entry = (void *)(list->entries + (size_t)(list->found - 1) * list->stride);
    entry->pid = process->pid;
    entry->usedGpuMemory = process->bytes;
    if (list->stride > offsetof(nvmlProcessInfo_longest_t, gpuInstanceId)) {
        entry->gpuInstanceId = process->gpu_instance;
        entry->computeInstanceId = process->compute_instance;
    }
    if (list->stride == sizeof *entry) entry->usedGpuCcProtectedMemory = 0;
}

/* Those of the stub libcuda that are on this GPU: with a context or with memory, and not checkpointed. */
static void add_cuda_processes(struct list *list, const struct device *device) {
    struct node *node = device->gpu < NODE_GPUS && device->instance < 0 ? node_lock() : NULL;
    if (!node) return;
    for (int i = 0; i < NODE_PROCESSES; i++) {
        const struct node_process *one = &node->processes[i];
        unsigned long long bytes = one->pid && !one->is_out ? node_used_bytes_by(one, device->gpu) : 0;
        if (bytes) add_process(list, &(struct process){device->gpu, "compute", (unsigned int)one->pid, ~0u, ~0u, bytes});
    }
    node_unlock();
}

static nvmlReturn_t fill_processes(nvmlDevice_t device, const char *kind, unsigned int *count, char *entries) {
    struct list list = {entries, entries ? *count : 0, 0, scenario()->process_stride};
    for (int i = 0; i < scenario()->process_count; i++)
        if (is_on(&scenario()->processes[i], kind, device)) add_process(&list, &scenario()->processes[i]);
    if (!strcmp(kind, "compute")) add_cuda_processes(&list, device);
    *count = list.found;
    return list.found > list.room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESSES(function, list)                                                            \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, void *entries) {         \
        ENTER(device);                                                                       \
        return fill_processes(device, list, count, entries);                                 \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")
