/* Reads the scenario file and carries out what it orders; see scenario.h. One caller at a time, as the provider's
 * contract has it: a call that hangs here is not joined by a second one. */
#include "scenario.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nvml.h"

static struct scenario current;
static struct stat read_from;

struct scenario *scenario(void) {
    return &current;
}

static void refuse(const char *why, const char *line) {
    fprintf(stderr, "stub NVML: %s: %s\n", why, line);
    abort();
}

static struct gpu *gpu_at(int index, const char *line) {
    if (index < 0 || index >= MAX_GPUS) refuse("no such GPU", line);
    return &current.gpus[index];
}

/* FUNCTION[@GPU[/INSTANCE]], with * for any function. */
static void read_target(struct order *order, const char *target) {
    snprintf(order->function, sizeof order->function, "%s", target);
    order->gpu = order->instance = -1;
    char *at = strchr(order->function, '@');
    if (at) {
        *at = 0;
        if (sscanf(at + 1, "%d/%d", &order->gpu, &order->instance) < 1) refuse("bad target", target);
    }
}

static void read_fact(const char *rest, const char *line) {
    int index, used = 0;
    struct fact fact = {0};
    if (sscanf(rest, "%d %31s %n", &index, fact.key, &used) < 2) refuse("bad gpu line", line);
    snprintf(fact.value, sizeof fact.value, "%s", rest + used);
    struct gpu *gpu = gpu_at(index, line);
    if (gpu->fact_count == MAX_FACTS) refuse("too many facts", line);
    gpu->facts[gpu->fact_count++] = fact;
    if (index >= current.gpu_count) current.gpu_count = index + 1;
}

static void read_link(const char *rest, const char *line) {
    int index, number;
    struct link link = {.listed = 1};
    char state[16];
    if (sscanf(rest, "%d %d %31s %u %15s", &index, &number, link.pci, &link.version, state) != 5)
        refuse("bad nvlink line", line);
    if (number < 0 || number >= MAX_LINKS) refuse("no such link", line);
    link.active = !strcmp(state, "active");
    struct gpu *gpu = gpu_at(index, line);
    gpu->links[number] = link;
    gpu->link_count++;
}

static void read_process(const char *rest, const char *line) {
    struct process process = {.gpu_instance = ~0u, .compute_instance = ~0u};
    char bytes[32];
    int found = sscanf(rest, "%d %11s %u %31s %u %u", &process.gpu, process.list, &process.pid, bytes,
                       &process.gpu_instance, &process.compute_instance);
    if (found != 4 && found != 6) refuse("bad process line", line);
    process.bytes = strcmp(bytes, "N/A") ? strtoull(bytes, NULL, 10) : ~0ull;
    if (current.process_count == MAX_PROCESSES) refuse("too many processes", line);
    current.processes[current.process_count++] = process;
}

static void read_order(const char *what, const char *rest, const char *line) {
    struct order order = {0};
    char target[96], argument[1024] = "";
    snprintf(order.what, sizeof order.what, "%s", what);
    if (sscanf(rest, "%95s %1023s", target, argument) < 1) refuse("bad order", line);
    read_target(&order, target);
    order.number = strtol(argument, NULL, 10);
    snprintf(order.fifo, sizeof order.fifo, "%s", argument);
    if (current.order_count == MAX_ORDERS) refuse("too many orders", line);
    current.orders[current.order_count++] = order;
}

static void read_instance(const char *rest, const char *line) {
    int index, number;
    struct instance instance = {.listed = 1};
    if (sscanf(rest, "%d %d %u %u", &index, &number, &instance.gpu_instance, &instance.compute_instance) != 4 ||
        number < 0 || number >= MAX_INSTANCES)
        refuse("bad instance line", line);
    gpu_at(index, line)->instances[number] = instance;
}

static void read_line(char *line) {
    char what[32] = "";
    int used = 0, a, b;
    if (sscanf(line, "%31s %n", what, &used) < 1 || *what == '#') return;
    const char *rest = line + used;
    if (!strcmp(what, "driver_version"))
        snprintf(current.driver_version, sizeof current.driver_version, "%s", rest);
    else if (!strcmp(what, "nvml_version"))
        snprintf(current.nvml_version, sizeof current.nvml_version, "%s", rest);
    else if (!strcmp(what, "log"))
        snprintf(current.log, sizeof current.log, "%s", rest);
    else if (!strcmp(what, "driver"))
        snprintf(current.driver, sizeof current.driver, "%s", rest);
    else if (!strcmp(what, "kept"))
        snprintf(current.kept, sizeof current.kept, "%s", rest);
    else if (!strcmp(what, "cuda_version"))
        current.cuda_version = atoi(rest);
    else if (!strcmp(what, "epoch"))
        current.epoch = atol(rest);
    else if (!strcmp(what, "process_stride"))
        current.process_stride = (unsigned int)atoi(rest);
    else if (!strcmp(what, "gpu"))
        read_fact(rest, line);
    else if (!strcmp(what, "nvlink"))
        read_link(rest, line);
    else if (!strcmp(what, "process"))
        read_process(rest, line);
    else if (!strcmp(what, "instance"))
        read_instance(rest, line);
    else if (!strcmp(what, "error") || !strcmp(what, "hang") || !strcmp(what, "hold") || !strcmp(what, "delay"))
        read_order(what, rest, line);
    else if (!strcmp(what, "lost_after") && sscanf(rest, "%d %d", &a, &b) == 2)
        gpu_at(a, line)->lost_after = b;
    else if (!strcmp(what, "xid")) {
        struct xid *xid = &current.xids[current.xid_count];
        if (current.xid_count++ == MAX_ORDERS || sscanf(rest, "%ld %d %llu", &xid->sequence, &xid->gpu, &xid->number) != 3)
            refuse("bad xid line", line);
    } else if (!strcmp(what, "p2p") && sscanf(rest, "%d %d %n", &a, &b, &used) >= 2) {
        gpu_at(a, line), gpu_at(b, line);
        snprintf(current.peers[a][b], sizeof current.peers[a][b], "%s", rest + used);
    } else
        refuse("a line that means nothing", line);
}

static void read_again_if_changed(void) {
    const char *path = getenv("HEGM_NVML_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now)) refuse("HEGM_NVML_SCENARIO names no file", path ? path : "(unset)");
    if (now.st_ino == read_from.st_ino && now.st_dev == read_from.st_dev &&
        !memcmp(&now.st_mtim, &read_from.st_mtim, sizeof now.st_mtim) && now.st_size == read_from.st_size)
        return;
    FILE *file = fopen(path, "re");
    if (!file || fstat(fileno(file), &read_from)) refuse("cannot read", path);
    memset(&current, 0, sizeof current);
    current.process_stride = 24;
    for (int i = 0; i < MAX_GPUS; i++) current.gpus[i].lost_after = -1;
    char line[2048];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(line);
    }
    fclose(file);
}

static const struct order *ordered(const char *what, const char *function, const struct device *device) {
    for (int i = 0; i < current.order_count; i++) {
        const struct order *order = &current.orders[i];
        if (strcmp(order->what, what)) continue;
        if (strcmp(order->function, "*") && strcmp(order->function, function)) continue;
        if (order->gpu >= 0 && (!device || device->gpu != order->gpu)) continue;
        if (order->gpu >= 0 && device->instance != order->instance) continue;
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

static void append(const char *path, const char *line) {
    if (!*path) return;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || dprintf(fd, "%s\n", line) < 0) refuse("cannot write", path);
    close(fd);
}

int scenario_open_driver(void) {
    if (!*current.driver) return -1;
    int fd = open(current.driver, O_RDWR | O_CLOEXEC);
    if (fd < 0) refuse("cannot open the driver's file", current.driver);
    return fd;
}

void scenario_note_kept(int fd) {
    char line[64];
    snprintf(line, sizeof line, "%d %d", (int)getpid(), fd);
    append(current.kept, line);
}

int scenario_enter(const char *function, const struct device *device) {
    read_again_if_changed();
    append(current.log, function);
    const struct order *order = ordered("hold", function, device);
    if (order) {
        wait_at(order->fifo);
        read_again_if_changed();
    }
    while (ordered("hang", function, device)) {
        usleep(2000);
        read_again_if_changed();
    }
    order = ordered("delay", function, device);
    if (order) usleep((useconds_t)order->number);
    if (device) current.gpus[device->gpu].calls++;
    order = ordered("error", function, device);
    return order ? (int)order->number : NVML_SUCCESS;
}

int scenario_lost(int index) {
    const struct gpu *gpu = &current.gpus[index];
    return gpu->lost_after >= 0 && gpu->calls > gpu->lost_after;
}

const char *scenario_fact(int index, const char *key) {
    const struct gpu *gpu = &current.gpus[index];
    for (int i = 0; i < gpu->fact_count; i++)
        if (!strcmp(gpu->facts[i].key, key)) return strcmp(gpu->facts[i].value, "N/A") ? gpu->facts[i].value : NULL;
    return NULL;
}
