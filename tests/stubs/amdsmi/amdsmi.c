/* A stub libamd_smi.so.26 for the true Python binding: the functions that hegmd calls, answering from the scenario.
 *
 * It follows the library of ROCm 7 in what matters to a caller: GPUs are those that were there when it was initialised;
 * what a chip does not have is NOT_SUPPORTED or all ones; and of a GPU that fell off the bus nearly everything is
 * NOT_SUPPORTED too, because its files are gone. No one has run this beside AMD hardware yet.
 */
#include "amdsmi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scenario.h"

static int initialised, known_gpus;
static int handles[MAX_GPUS];

/* A call about a GPU: leaves the function unless it is to go on. */
#define ENTER(handle)                                                          \
    int gpu = (int)((int *)(handle) - handles);                                \
    if (!initialised) return AMDSMI_NOT_INIT;                                  \
    if (gpu < 0 || gpu >= known_gpus) return AMDSMI_INVAL;                     \
    int ordered_status = scenario_enter(__func__, gpu);                        \
    if (ordered_status) return (status_t)ordered_status;                       \
    if (scenario_lost(gpu)) return AMDSMI_NOT_SUPPORTED

/* As ENTER, for a fact that the whole call is about. */
#define ENTER_FOR(handle, key)                                                 \
    ENTER(handle);                                                             \
    if (!scenario_text(gpu, key)) return AMDSMI_NOT_SUPPORTED

static void copy(char *to, size_t size, int gpu, const char *key) {
    const char *text = scenario_text(gpu, key);
    snprintf(to, size, "%s", text ? text : "");
}

static uint64_t bdf_of(int gpu) {
    unsigned domain = 0, bus = 0, device = 0, function = 0;
    const char *text = scenario_text(gpu, "pci");
    if (!text || sscanf(text, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) abort();
    return function | (uint64_t)device << 3 | (uint64_t)bus << 8 | (uint64_t)domain << 16;
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

status_t amdsmi_init(uint64_t flags) {
    int status = scenario_enter(__func__, -1);
    if (status) return (status_t)status;
    if (flags != 2) return AMDSMI_INVAL;
    if (!scenario.has_driver) return AMDSMI_DRIVER_NOT_LOADED;
    initialised = 1;
    known_gpus = scenario.gpu_count;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_shut_down(void) {
    int status = scenario_enter(__func__, -1);
    initialised = 0;
    return (status_t)status;
}

status_t amdsmi_get_lib_version(struct version *version) {
    if (!initialised) return AMDSMI_NOT_INIT;
    int status = scenario_enter(__func__, -1);
    if (status) return (status_t)status;
    *version = (struct version){scenario.version[0], scenario.version[1], scenario.version[2], "stub"};
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_socket_handles(uint32_t *count, handle_t *sockets) {
    if (!initialised) return AMDSMI_NOT_INIT;
    int status = scenario_enter(__func__, -1);
    if (status) return (status_t)status;
    for (int i = 0; sockets && i < known_gpus; i++) sockets[i] = &handles[i];
    *count = (uint32_t)known_gpus;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_processor_handles(handle_t socket, uint32_t *count, handle_t *processors) {
    if (!initialised) return AMDSMI_NOT_INIT;
    int status = scenario_enter(__func__, -1);
    if (status) return (status_t)status;
    if (processors) *processors = socket; /* one GPU in each socket */
    *count = 1;
    return AMDSMI_SUCCESS;
}

/* ---- what it is ------------------------------------------------------------------------------------------------- */

status_t amdsmi_get_gpu_device_bdf(handle_t handle, uint64_t *bdf) {
    int gpu = (int)((int *)handle - handles); /* kept from the start, so it is reported a lost GPU as well */
    if (!initialised) return AMDSMI_NOT_INIT;
    int status = scenario_enter(__func__, gpu);
    *bdf = bdf_of(gpu);
    return (status_t)status;
}

status_t amdsmi_get_gpu_asic_info(handle_t handle, struct asic_info *info) {
    ENTER(handle);
    memset(info, 0, sizeof *info);
    copy(info->market_name, sizeof info->market_name, gpu, "name");
    copy(info->asic_serial, sizeof info->asic_serial, gpu, "serial");
    snprintf(info->vendor_name, sizeof info->vendor_name, "Advanced Micro Devices, Inc. [AMD/ATI]");
    info->vendor_id = 0x1002;
    info->device_id = scenario_text(gpu, "device_id") ? scenario_number(gpu, "device_id") : 0;
    info->target_graphics_version = scenario_number(gpu, "gfx");
    info->oam_id = info->compute_units = UINT32_MAX;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_driver_info(handle_t handle, struct driver_info *info) {
    ENTER(handle);
    memset(info, 0, sizeof *info);
    snprintf(info->version, sizeof info->version, "%s", scenario.driver_version);
    snprintf(info->name, sizeof info->name, "amdgpu");
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_topo_numa_affinity(handle_t handle, int32_t *node) {
    ENTER_FOR(handle, "numa");
    *node = (int32_t)scenario_number(gpu, "numa");
    return AMDSMI_SUCCESS;
}

/* ---- links ------------------------------------------------------------------------------------------------------ */

static const struct link *link_between(handle_t one, handle_t other) {
    return &scenario.gpus[(int *)one - handles].links[(int *)other - handles];
}

status_t amdsmi_get_link_metrics(handle_t handle, struct link_metrics *metrics) {
    ENTER(handle);
    memset(metrics, 0, sizeof *metrics);
    for (int other = 0; other < known_gpus; other++) {
        const struct link *link = &scenario.gpus[gpu].links[other];
        for (uint32_t lane = 0; !strcmp(link->kind, "xgmi") && lane < link->lanes; lane++) {
            metrics->links[metrics->num_links].bdf = bdf_of(other);
            metrics->links[metrics->num_links++].link_type = LINK_XGMI;
        }
    }
    return AMDSMI_SUCCESS;
}

status_t amdsmi_topo_get_link_type(handle_t handle, handle_t other, uint64_t *hops, uint32_t *type) {
    ENTER(handle);
    const struct link *link = link_between(handle, other);
    if (!*link->kind) return AMDSMI_NOT_SUPPORTED;
    *type = !strcmp(link->kind, "xgmi") ? LINK_XGMI : LINK_PCIE;
    *hops = *type == LINK_XGMI ? 1 : 2;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_minmax_bandwidth_between_processors(handle_t handle, handle_t other, uint64_t *min, uint64_t *max) {
    ENTER(handle);
    *min = *max = link_between(handle, other)->mb_per_s;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_is_P2P_accessible(handle_t handle, handle_t other, bool *accessible) {
    ENTER(handle);
    *accessible = strcmp(link_between(handle, other)->kind, "nop2p") != 0;
    return AMDSMI_SUCCESS;
}

/* ---- how it does ------------------------------------------------------------------------------------------------ */

status_t amdsmi_get_gpu_memory_total(handle_t handle, uint32_t kind, uint64_t *bytes) {
    ENTER_FOR(handle, "memory_total");
    if (kind != MEMORY_VRAM) return AMDSMI_NOT_SUPPORTED;
    *bytes = scenario_number(gpu, "memory_total");
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_memory_usage(handle_t handle, uint32_t kind, uint64_t *bytes) {
    ENTER_FOR(handle, "memory_used");
    if (kind != MEMORY_VRAM) return AMDSMI_NOT_SUPPORTED;
    *bytes = scenario_number(gpu, "memory_used");
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_activity(handle_t handle, struct engine_usage *usage) {
    ENTER(handle);
    memset(usage, 0, sizeof *usage);
    usage->gfx = scenario_text(gpu, "activity") ? (uint32_t)scenario_number(gpu, "activity") : 0xFFFF;
    usage->umc = usage->mm = 0xFFFF;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_temp_metric(handle_t handle, uint32_t sensor, uint32_t metric, int64_t *celsius) {
    ENTER(handle);
    const char *key = sensor == TEMPERATURE_HOTSPOT ? "hotspot" : sensor == TEMPERATURE_EDGE ? "edge" : "";
    if (metric || !scenario_text(gpu, key)) return AMDSMI_NOT_SUPPORTED;
    *celsius = (int64_t)scenario_number(gpu, key);
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_power_info(handle_t handle, struct power_info *info) {
    ENTER(handle);
    memset(info, 0xFF, sizeof *info);
    if (scenario_text(gpu, "power")) info->current_socket_power = (uint32_t)scenario_number(gpu, "power");
    if (scenario_text(gpu, "average_power")) info->average_socket_power = (uint32_t)scenario_number(gpu, "average_power");
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_power_cap_info(handle_t handle, uint32_t sensor, struct power_cap_info *info) {
    ENTER_FOR(handle, "power_cap");
    if (sensor) return AMDSMI_INVAL;
    memset(info, 0, sizeof *info);
    info->power_cap = scenario_number(gpu, "power_cap");
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_ecc_count(handle_t handle, uint64_t block, struct error_count *count) {
    ENTER_FOR(handle, "ecc");
    if (block != BLOCK_UMC) return AMDSMI_NOT_SUPPORTED;
    memset(count, 0, sizeof *count);
    sscanf(scenario_text(gpu, "ecc"), "%lu %lu %lu", &count->correctable, &count->uncorrectable, &count->deferred);
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_bad_page_info(handle_t handle, uint32_t *count, struct page_record *pages) {
    ENTER_FOR(handle, "pages");
    uint32_t of_status[3] = {0}, found = 0;
    sscanf(scenario_text(gpu, "pages"), "%u %u %u", &of_status[0], &of_status[1], &of_status[2]);
    for (uint32_t status = 0; status < 3; status++)
        for (uint32_t i = 0; i < of_status[status]; i++, found++)
            if (pages && found < *count) pages[found] = (struct page_record){found * 4096, 4096, status};
    *count = found;
    return AMDSMI_SUCCESS;
}

status_t amdsmi_get_gpu_process_list(handle_t handle, uint32_t *count, struct proc_info *list) {
    ENTER(handle);
    uint32_t found = 0;
    for (int i = 0; i < scenario.process_count; i++) {
        const struct process *process = &scenario.processes[i];
        if (process->gpu != gpu) continue;
        if (list && found < *count) {
            struct proc_info *entry = &list[found];
            memset(entry, 0, sizeof *entry);
            entry->pid = process->pid;
            entry->mem = entry->memory_usage.vram_mem = process->bytes;
            memcpy(entry->name, process->name, sizeof process->name);
        }
        found++;
    }
    /* Without permission the list is complete and says so only by its status, which the scenario orders by a fact. */
    status_t status = found > *count ? AMDSMI_OUT_OF_RESOURCES : AMDSMI_SUCCESS;
    if (scenario_text(gpu, "process_status")) status = (status_t)scenario_number(gpu, "process_status");
    *count = found;
    return status;
}
