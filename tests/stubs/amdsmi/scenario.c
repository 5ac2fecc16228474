/* Reads the scenario file and carries out what it orders; see scenario.h. One caller at a time, as the provider's
 * contract has it: a call that hangs here is not joined by a second one. */
#include "scenario.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct scenario scenario;
static struct stat read_from;

static void refuse(const char *why, const char *line) {
    fprintf(stderr, "stub AMD SMI: %s: %s\n", why, line);
    abort();
}

static struct gpu *gpu_at(int index, const char *line) {
    if (index < 0 || index >= MAX_GPUS) refuse("no such GPU", line);
    return &scenario.gpus[index];
}

static void read_fact(const char *line) {
    int index, used = 0;
    struct fact fact = {0};
    if (sscanf(line, "gpu %d %31s %n", &index, fact.key, &used) < 2) refuse("bad gpu line", line);
    snprintf(fact.value, sizeof fact.value, "%s", line + used);
    struct gpu *gpu = gpu_at(index, line);
    if (gpu->fact_count == MAX_FACTS) refuse("too many facts", line);
    gpu->facts[gpu->fact_count++] = fact;
    if (index >= scenario.gpu_count) scenario.gpu_count = index + 1;
}

static void read_link(const char *line) {
    int from, to;
    struct link link = {0};
    if (sscanf(line, "link %d %d %7s %lu %u", &from, &to, link.kind, &link.mb_per_s, &link.lanes) != 5)
        refuse("bad link line", line);
    gpu_at(from, line)->links[to] = link;
    gpu_at(to, line)->links[from] = link;
}

static void read_process(const char *line) {
    struct process process = {0};
    if (sscanf(line, "process %d %u %lu %63[^\n]", &process.gpu, &process.pid, &process.bytes, process.name) < 3)
        refuse("bad process line", line);
    if (scenario.process_count == MAX_PROCESSES) refuse("too many processes", line);
    scenario.processes[scenario.process_count++] = process;
}

/* error|hang|hold FUNCTION[@GPU] [CODE or FIFO], with * for any function. */
static void read_order(const char *line) {
    struct order order = {.gpu = -1};
    if (sscanf(line, "%7s %95s %1023s", order.what, order.function, order.argument) < 2) refuse("bad order", line);
    char *at = strchr(order.function, '@');
    if (at) {
        *at = 0;
        order.gpu = atoi(at + 1);
    }
    if (scenario.order_count == MAX_ORDERS) refuse("too many orders", line);
    scenario.orders[scenario.order_count++] = order;
}

static void read_line(const char *line) {
    char what[32] = "";
    int gpu;
    long calls;
    uint32_t *version = scenario.version;
    if (sscanf(line, "%31s", what) < 1) return;
    if (!strcmp(what, "gpu"))
        read_fact(line);
    else if (!strcmp(what, "link"))
        read_link(line);
    else if (!strcmp(what, "process"))
        read_process(line);
    else if (!strcmp(what, "error") || !strcmp(what, "hang") || !strcmp(what, "hold"))
        read_order(line);
    else if (!strcmp(what, "driver_version"))
        sscanf(line, "driver_version %63s", scenario.driver_version);
    else if (!strcmp(what, "log"))
        sscanf(line, "log %1023s", scenario.log);
    else if (!strcmp(what, "no_driver"))
        scenario.has_driver = 0;
    else if (sscanf(line, "lost_after %d %ld", &gpu, &calls) == 2)
        gpu_at(gpu, line)->lost_after = calls;
    else if (sscanf(line, "version %u %u %u", version, version + 1, version + 2) != 3)
        refuse("a line that means nothing", line);
}

static void read_again_if_changed(void) {
    const char *path = getenv("HEGM_AMDSMI_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now)) refuse("HEGM_AMDSMI_SCENARIO names no file", path ? path : "(unset)");
    if (now.st_ino == read_from.st_ino && now.st_dev == read_from.st_dev && now.st_size == read_from.st_size &&
        !memcmp(&now.st_mtim, &read_from.st_mtim, sizeof now.st_mtim))
        return;
    FILE *file = fopen(path, "re");
    if (!file || fstat(fileno(file), &read_from)) refuse("cannot read", path);
    memset(&scenario, 0, sizeof scenario);
    scenario.has_driver = 1;
    for (int i = 0; i < MAX_GPUS; i++) scenario.gpus[i].lost_after = -1;
    char line[2048];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(line);
    }
    fclose(file);
}

static const struct order *ordered(const char *what, const char *function, int gpu) {
    for (int i = 0; i < scenario.order_count; i++) {
        const struct order *order = &scenario.orders[i];
        if (strcmp(order->what, what)) continue;
        if (strcmp(order->function, "*") && strcmp(order->function, function)) continue;
        if (order->gpu >= 0 && order->gpu != gpu) continue;
        return order;
    }
    return NULL;
}

/* Blocks until somebody opens the FIFO for writing and closes it again: both ends then know where the other is. */
static void wait_at(const char *fifo) {
    int fd = open(fifo, O_RDONLY | O_CLOEXEC);
    if (fd < 0) refuse("cannot open the FIFO", fifo);
    char byte;
    while (read(fd, &byte, 1) > 0) {}
    close(fd);
}

static void note(const char *function) {
    if (!*scenario.log) return;
    int fd = open(scenario.log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || dprintf(fd, "%s\n", function) < 0) refuse("cannot write the log", scenario.log);
    close(fd);
}

int scenario_enter(const char *function, int gpu) {
    read_again_if_changed();
    note(function);
    const struct order *order = ordered("hold", function, gpu);
    if (order) {
        wait_at(order->argument);
        read_again_if_changed();
    }
    while (ordered("hang", function, gpu)) {
        usleep(2000);
        read_again_if_changed();
    }
    if (gpu >= 0) scenario.gpus[gpu].calls++;
    order = ordered("error", function, gpu);
    return order ? atoi(order->argument) : 0;
}

int scenario_lost(int index) {
    const struct gpu *gpu = &scenario.gpus[index];
    return gpu->lost_after >= 0 && gpu->calls > gpu->lost_after;
}

const char *scenario_text(int index, const char *key) {
    const struct gpu *gpu = &scenario.gpus[index];
    for (int i = 0; i < gpu->fact_count; i++)
        if (!strcmp(gpu->facts[i].key, key)) return gpu->facts[i].value;
    return NULL;
}

uint64_t scenario_number(int index, const char *key) {
    const char *value = scenario_text(index, key);
    return value ? strtoull(value, NULL, 0) : UINT64_MAX;
}
