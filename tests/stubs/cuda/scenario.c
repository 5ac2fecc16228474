/* Reads the scenario file and carries out what it orders; see scenario.h. */
#include "scenario.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_ORDERS = 128, MAX_COUNTED = 512 };

/* What is to happen to a call; `from` and `to` are the first and last call of this process that it happens to. */
struct order {
    char what[32], function[96], argument[1024];
    long subject, number, from, to;
};

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct facts facts;
static struct order orders[MAX_ORDERS];
static int order_count, counted_count;
static struct {
    char function[96];
    long calls;
} counted[MAX_COUNTED];
static char log_path[1024];
static struct stat read_from;

static void refuse(const char *why, const char *line) {
    fprintf(stderr, "stub CUDA: %s: %s\n", why, line);
    abort();
}

static void read_uuid(const char *text, CUuuid *uuid) {
    int at = 0;
    if (strncmp(text, "GPU-", 4)) refuse("bad uuid", text);
    for (const char *next = text + 4; *next && at < 16; next++) {
        if (*next == '-') continue;
        unsigned int byte;
        if (sscanf(next++, "%2x", &byte) != 1) refuse("bad uuid", text);
        uuid->bytes[at++] = (unsigned char)byte;
    }
    if (at != 16) refuse("bad uuid", text);
}

/* gpu INDEX UUID PCI BYTES CHIP NAME */
static void read_gpu(const char *rest) {
    int index, used = 0;
    char uuid[64], pci[32];
    struct gpu gpu = {0};
    if (sscanf(rest, "%d %63s %31s %lu %31s %n", &index, uuid, pci, &gpu.bytes, gpu.chip, &used) != 5 || index < 0 ||
        index >= NODE_GPUS)
        refuse("bad gpu line", rest);
    if (sscanf(pci, "%x:%x:%x", &gpu.domain, &gpu.bus, &gpu.device) != 3) refuse("bad address", rest);
    snprintf(gpu.name, sizeof gpu.name, "%s", rest + used);
    read_uuid(uuid, &gpu.uuid);
    gpu.was = gpu.uuid;
    facts.gpus[index] = gpu;
    if (index >= facts.gpu_count) facts.gpu_count = index + 1;
}

/* was INDEX UUID */
static void read_was(const char *rest) {
    int index;
    char uuid[64];
    if (sscanf(rest, "%d %63s", &index, uuid) != 2 || index < 0 || index >= facts.gpu_count) refuse("bad was line", rest);
    read_uuid(uuid, &facts.gpus[index].was);
    facts.is_another_node = 1;
}

/* The subject is what the call is about, or the process that makes it.
 * WHAT FUNCTION[@SUBJECT] [ARGUMENT [FROM [TO]]] */
static void read_order(const char *what, const char *rest) {
    struct order order = {.subject = -1, .from = 1, .to = -1};
    snprintf(order.what, sizeof order.what, "%s", what);
    int found = sscanf(rest, "%95s %1023s %ld %ld", order.function, order.argument, &order.from, &order.to);
    if (found < 1) refuse("bad order", rest);
    order.number = strtol(order.argument, NULL, 0);
    char *at = strchr(order.function, '@');
    if (at) {
        *at = 0;
        order.subject = strtol(at + 1, NULL, 10);
    }
    if (order_count == MAX_ORDERS) refuse("too many orders", rest);
    orders[order_count++] = order;
}

static void read_line(const char *line) {
    char what[32] = "";
    int used = 0;
    if (sscanf(line, "%31s %n", what, &used) < 1 || *what == '#') return;
    const char *rest = line + used;
    if (!strcmp(what, "gpu"))
        read_gpu(rest);
    else if (!strcmp(what, "was"))
        read_was(rest);
    else if (!strcmp(what, "driver_version"))
        facts.driver_version = atoi(rest);
    else if (!strcmp(what, "context_bytes"))
        facts.context_bytes = strtoull(rest, NULL, 10);
    else if (!strcmp(what, "restore_bytes"))
        facts.restore_bytes = strtoull(rest, NULL, 10);
    else if (!strcmp(what, "stream_bytes"))
        facts.stream_bytes = strtoull(rest, NULL, 10);
    else if (!strcmp(what, "open_bytes"))
        facts.open_bytes = strtoull(rest, NULL, 10);
    else if (!strcmp(what, "checkpoint_bytes"))
        facts.checkpoint_bytes = strtoull(rest, NULL, 10);
    else if (!strcmp(what, "log"))
        snprintf(log_path, sizeof log_path, "%s", rest);
    else if (!strcmp(what, "error") || !strcmp(what, "delay") || !strcmp(what, "hang") || !strcmp(what, "hold") ||
             !strcmp(what, "lose") || !strcmp(what, "fail") || !strcmp(what, "nccl_p2p"))
        read_order(what, rest);
    else
        refuse("a line that means nothing", line);
}

static void read_again_if_changed(void) {
    char path[1100];
    struct stat now;
    snprintf(path, sizeof path, "%s/scenario", node_folder() ? node_folder() : "");
    if (stat(path, &now)) refuse("HEGM_CUDA_STUB names no folder with a scenario", path);
    if (now.st_ino == read_from.st_ino && now.st_dev == read_from.st_dev && now.st_size == read_from.st_size &&
        !memcmp(&now.st_mtim, &read_from.st_mtim, sizeof now.st_mtim))
        return;
    FILE *file = fopen(path, "re");
    if (!file || fstat(fileno(file), &read_from)) refuse("cannot read", path);
    memset(&facts, 0, sizeof facts);
    order_count = *log_path = 0;
    char line[2048];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(line);
    }
    fclose(file);
}

static const struct order *ordered(const char *what, const char *function, long subject, long call) {
    for (int i = 0; i < order_count; i++) {
        const struct order *order = &orders[i];
        if (strcmp(order->what, what) || (strcmp(order->function, "*") && strcmp(order->function, function))) continue;
        if (order->subject >= 0 && order->subject != subject && order->subject != getpid()) continue;
        if (call < order->from || (order->to >= 0 && call > order->to)) continue;
        return order;
    }
    return NULL;
}

static long count(const char *function) {
    int i = 0;
    while (i < counted_count && strcmp(counted[i].function, function)) i++;
    if (i == MAX_COUNTED) refuse("too many functions", function);
    if (i == counted_count) snprintf(counted[counted_count++].function, sizeof counted->function, "%s", function);
    return ++counted[i].calls;
}

static void note(const char *function, long subject) {
    if (!*log_path) return;
    int fd = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) fchmod(fd, 0666); /* everybody's, whatever the umask */
    if (fd < 0 || dprintf(fd, "%d %s %ld\n", (int)getpid(), function, subject) < 0) refuse("cannot write", log_path);
    close(fd);
}

/* Blocks until somebody opens the FIFO for writing and closes it again: both ends then know where the other is. */
static void wait_at(const char *fifo) {
    int fd = open(fifo, O_RDONLY | O_CLOEXEC);
    if (fd < 0) refuse("cannot open the FIFO", fifo);
    char byte;
    while (read(fd, &byte, 1) > 0) {}
    close(fd);
}

/* The order of that kind as it is now, in `found`; the guard is not held while anybody waits. */
static int look(const char *what, const char *function, long subject, long call, struct order *found) {
    pthread_mutex_lock(&guard);
    read_again_if_changed();
    const struct order *order = ordered(what, function, subject, call);
    if (order) *found = *order;
    pthread_mutex_unlock(&guard);
    return order != NULL;
}

int scenario_enter(const char *function, long subject) {
    pthread_mutex_lock(&guard);
    read_again_if_changed();
    long call = count(function);
    note(function, subject);
    pthread_mutex_unlock(&guard);
    struct order order;
    if (look("hold", function, subject, call, &order)) wait_at(order.argument);
    while (look("hang", function, subject, call, &order)) usleep(2000);
    if (look("delay", function, subject, call, &order)) usleep((useconds_t)order.number);
    return look("error", function, subject, call, &order) ? (int)order.number : 0;
}

int scenario_has(const char *what, const char *function, long subject, long *number) {
    struct order order;
    int has = look(what, function, subject, 1, &order);
    if (has && number) *number = order.number;
    return has;
}

struct facts scenario_facts(void) {
    pthread_mutex_lock(&guard);
    read_again_if_changed();
    struct facts copy = facts;
    pthread_mutex_unlock(&guard);
    return copy;
}
