/* The part of AMD SMI's interface that hegmd uses, as libamd_smi.so.26 (ROCm 7) lays it out.
 *
 * Written from the fields and sizes that the Python binding 7.0.2 declares; the asserts below are its sizes, so that a
 * stub which drifts from them does not compile. Everything that a struct reserves is one array at its end.
 */
#ifndef HEGM_STUB_AMDSMI_H
#define HEGM_STUB_AMDSMI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    AMDSMI_SUCCESS = 0,
    AMDSMI_INVAL = 1,
    AMDSMI_NOT_SUPPORTED = 2,
    AMDSMI_OUT_OF_RESOURCES = 15,
    AMDSMI_NOT_FOUND = 31,
    AMDSMI_NOT_INIT = 32,
    AMDSMI_DRIVER_NOT_LOADED = 34,
};

enum { LINK_INTERNAL, LINK_PCIE, LINK_XGMI };
enum { TEMPERATURE_EDGE = 0, TEMPERATURE_HOTSPOT = 1 };
enum { BLOCK_UMC = 1 };
enum { MEMORY_VRAM = 0 };

typedef uint32_t status_t;
typedef void *handle_t;

struct version {
    uint32_t major, minor, release;
    const char *build;
};

struct asic_info {
    char market_name[256];
    uint32_t vendor_id;
    char vendor_name[256];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[256];
    uint32_t oam_id, compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id, reserved[21];
};

struct driver_info {
    char version[256], date[256], name[256];
};

struct engine_usage {
    uint32_t gfx, umc, mm, reserved[13];
};

struct power_info {
    uint64_t socket_power;
    uint32_t current_socket_power, average_socket_power;
    uint64_t gfx_voltage, soc_voltage, mem_voltage;
    uint32_t power_limit;
    uint64_t reserved[18];
};

struct power_cap_info {
    uint64_t power_cap, default_cap, dpm_cap, min_cap, max_cap, reserved[3];
};

struct error_count {
    uint64_t correctable, uncorrectable, deferred, reserved[5];
};

struct page_record {
    uint64_t address, size;
    uint32_t status;
};

struct link_metrics {
    uint32_t num_links;
    struct {
        uint64_t bdf;
        uint32_t bit_rate, max_bandwidth, link_type;
        uint64_t read, write, reserved[2];
    } links[64];
    uint64_t reserved[7];
};

struct proc_info {
    char name[256];
    uint32_t pid;
    uint64_t mem;
    struct {
        uint64_t gfx, enc;
        uint32_t reserved[12];
    } engine_usage;
    struct {
        uint64_t gtt_mem, cpu_mem, vram_mem;
        uint32_t reserved[10];
    } memory_usage;
    char container_name[256];
    uint32_t cu_occupancy, reserved[11];
};

_Static_assert(sizeof(struct version) == 24, "amdsmi_version_t");
_Static_assert(sizeof(struct asic_info) == 896, "amdsmi_asic_info_t");
_Static_assert(sizeof(struct driver_info) == 768, "amdsmi_driver_info_t");
_Static_assert(sizeof(struct engine_usage) == 64, "amdsmi_engine_usage_t");
_Static_assert(sizeof(struct power_info) == 192, "amdsmi_power_info_t");
_Static_assert(sizeof(struct power_cap_info) == 64, "amdsmi_power_cap_info_t");
_Static_assert(sizeof(struct error_count) == 64, "amdsmi_error_count_t");
_Static_assert(sizeof(struct page_record) == 24, "amdsmi_retired_page_record_t");
_Static_assert(sizeof(struct link_metrics) == 3648, "amdsmi_link_metrics_t");
_Static_assert(sizeof(struct proc_info) == 704, "amdsmi_proc_info_t");

#endif
