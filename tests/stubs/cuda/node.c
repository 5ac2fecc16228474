/* Keeps what all processes on the stub's node share; see node.h. Knows nothing of CUDA's or NVML's functions. */
#include "node.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t inner = PTHREAD_MUTEX_INITIALIZER;
static struct node *table;
static char folder[1024];
static int outer = -1;

static void refuse(const char *what, const char *where) {
    fprintf(stderr, "stub node: %s: %s: %s\n", what, where, strerror(errno));
    abort();
}

const char *node_folder(void) {
    return getenv("HEGM_CUDA_STUB");
}

static const char *piece_path(uint64_t id, char *path) {
    snprintf(path, 320, "%s/memory/%llu", folder, (unsigned long long)id);
    return path;
}

/* A process that CRIU has restored is in a time namespace, and reads all start times as much later or earlier as its
 * own clock is: by so many ticks. */
static int64_t own_offset_ticks(void) {
    FILE *offsets = fopen("/proc/self/timens_offsets", "re");
    if (!offsets) return 0; /* a kernel without time namespaces */
    char line[128];
    long long seconds = 0, nanoseconds = 0;
    while (fgets(line, sizeof line, offsets)) sscanf(line, "boottime %lld %lld", &seconds, &nanoseconds);
    fclose(offsets);
    long hertz = sysconf(_SC_CLK_TCK);
    return seconds * hertz + nanoseconds / (1000000000L / hertz);
}

uint64_t node_start_ticks(pid_t pid, char *state) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    char *field = strrchr(text, ')'); /* the name before it may hold anything */
    if (!field) return 0;
    *state = field[2];
    for (int i = 0; i < 20 && field; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field + 1, NULL, 10) - (uint64_t)own_offset_ticks() : 0;
}

/* The offset is no whole number of ticks; no number of a process comes around so soon. */
static int is_same_start(uint64_t one, uint64_t other) {
    return one - other + 2 <= 4;
}

int node_lives(pid_t pid, uint64_t start_ticks) {
    char state = 0;
    return pid && is_same_start(node_start_ticks(pid, &state), start_ticks) && state != 'Z' && state != 'X';
}

/* Everybody's, whatever the umask: processes of several users share a node. */
static int open_shared(const char *path, int flags) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | flags, 0666);
    if (fd < 0) refuse("cannot open", path);
    fchmod(fd, 0666);
    return fd;
}

static void map_folder(const char *wanted) {
    if (table && !strcmp(wanted, folder)) return;
    if (table) munmap(table, sizeof *table); /* a test of the same process, with another node */
    snprintf(folder, sizeof folder, "%s", wanted);
    char path[1100];
    snprintf(path, sizeof path, "%s/node", folder);
    int fd = open_shared(path, 0);
    if (ftruncate(fd, sizeof *table)) refuse("cannot make the table", path);
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (table == MAP_FAILED) refuse("cannot map the table", path);
    close(fd);
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

static struct node_piece *piece(uint64_t id) {
    for (int i = 0; i < table->pieces_top; i++)
        if (table->pieces[i].id == id) return &table->pieces[i];
    return NULL;
}

static void forget(struct node_piece *gone) {
    char path[1100];
    unlink(piece_path(gone->id, path));
    memset(gone, 0, sizeof *gone);
    while (table->pieces_top && !table->pieces[table->pieces_top - 1].id) table->pieces_top--;
}

int node_open_piece(uint64_t id) {
    char path[1100];
    return open(piece_path(id, path), O_RDWR | O_CLOEXEC);
}

static int is_held(uint64_t id) {
    int fd = node_open_piece(id);
    if (fd < 0) return 0;
    int held = flock(fd, LOCK_EX | LOCK_NB) < 0;
    close(fd);
    return held;
}

int node_make_piece(int gpu, uint64_t bytes, uint64_t *id) {
    int place = 0;
    while (place < table->pieces_top && table->pieces[place].id) place++;
    if (place == NODE_PIECES) return -1;
    char path[1100], state;
    *id = ++table->last_id;
    int fd = open_shared(piece_path(*id, path), O_EXCL);
    if (flock(fd, LOCK_SH) || ftruncate(fd, (off_t)bytes)) refuse("cannot make a piece", path);
    if (place == table->pieces_top) table->pieces_top++;
    table->pieces[place] = (struct node_piece){
        .id = *id, .bytes = bytes, .owner = getpid(), .owner_start_ticks = node_start_ticks(getpid(), &state), .gpu = gpu};
    return fd;
}

int node_hold_piece(uint64_t id, struct node_piece *found) {
    struct node_piece *held = piece(id);
    if (!held || !is_held(id)) return -1;
    char path[1100];
    int fd = open(piece_path(id, path), O_RDWR | O_CLOEXEC);
    if (fd < 0 || flock(fd, LOCK_SH)) refuse("cannot hold a piece", path);
    held->is_shared = 1;
    *found = *held;
    return fd;
}

void node_share_piece(uint64_t id) {
    struct node_piece *shared = piece(id);
    if (shared) shared->is_shared = 1;
}

void node_drop_piece(uint64_t id) {
    struct node_piece *dropped = piece(id);
    if (!dropped) return;
    if (dropped->is_shared && is_held(id))
        dropped->owner = 0;
    else
        forget(dropped);
}

uint64_t node_piece_of(int fd) {
    char link[64], path[1200], expected[1100];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    char *name = strrchr(path, '/');
    uint64_t id = name ? strtoull(name + 1, NULL, 10) : 0;
    struct stat given, there;
    if (!id || fstat(fd, &given) || stat(piece_path(id, expected), &there)) return 0;
    return given.st_ino == there.st_ino && given.st_dev == there.st_dev ? id : 0;
}

/* ---- processes --------------------------------------------------------------------------------------------------- */

struct node_process *node_find(pid_t pid) {
    for (int i = 0; i < NODE_PROCESSES; i++)
        if (table->processes[i].pid == pid) return &table->processes[i];
    return NULL;
}

struct node_process *node_join(void) {
    char state;
    uint64_t start_ticks = node_start_ticks(getpid(), &state);
    struct node_process *place = node_find(getpid());
    if (place && is_same_start(place->start_ticks, start_ticks)) return place;
    if (!place) place = node_find(0);
    for (int i = 0; !place && i < NODE_PROCESSES; i++) /* of one that has been in an image for so long */
        if (!node_lives(table->processes[i].pid, table->processes[i].start_ticks)) place = &table->processes[i];
    if (!place) refuse("no place for one more process", folder);
    memset(place, 0, sizeof *place);
    place->pid = getpid();
    place->start_ticks = start_ticks;
    return place;
}

/* Its mapping of the table came out of an image with it, and nobody else has one. */
static int is_of_node(pid_t pid) {
    char path[1100], line[1024];
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "re");
    if (!maps) return 0;
    int length = snprintf(path, sizeof path, "%s/node\n", folder), found = 0;
    while (!found && fgets(line, sizeof line, maps)) {
        size_t read = strlen(line);
        found = read > (size_t)length && !strcmp(line + read - length, path);
    }
    fclose(maps);
    return found;
}

void node_revive(struct node_process *process) {
    char state;
    uint64_t start_ticks = node_start_ticks(process->pid, &state);
    if (process->was_out && !is_same_start(process->start_ticks, start_ticks) && is_of_node(process->pid))
        process->start_ticks = start_ticks;
}

uint64_t node_used_bytes_by(const struct node_process *process, int gpu) {
    uint64_t used = process->is_out ? 0 : process->context_bytes[gpu];
    for (int i = 0; i < table->pieces_top; i++) {
        const struct node_piece *one = &table->pieces[i];
        if (one->id && one->gpu == gpu && one->owner == process->pid) used += one->bytes;
    }
    return used;
}

uint64_t node_used_bytes(int gpu) {
    uint64_t used = 0;
    for (int i = 0; i < NODE_PROCESSES; i++)
        if (table->processes[i].pid && !table->processes[i].is_out) used += table->processes[i].context_bytes[gpu];
    for (int i = 0; i < table->pieces_top; i++)
        if (table->pieces[i].id && table->pieces[i].gpu == gpu) used += table->pieces[i].bytes;
    return used;
}

/* The kernel lets go of everything that a process held before it lets go of its pid, so the dead hold nothing. One that
 * was ever checkpointed may be in an image, as it was then, and come back with its number: its place is kept. */
static void bury(void) {
    for (int i = 0; i < NODE_PROCESSES; i++) {
        struct node_process *one = &table->processes[i];
        if (!one->pid || node_lives(one->pid, one->start_ticks)) continue;
        if (one->was_out) one->is_out = 1;
        else memset(one, 0, sizeof *one);
    }
    for (int i = table->pieces_top - 1; i >= 0; i--) {
        struct node_piece *one = &table->pieces[i];
        if (!one->id) continue;
        if (one->owner && !node_lives(one->owner, one->owner_start_ticks)) one->owner = 0;
        if (!one->owner && !is_held(one->id)) forget(one);
    }
}

struct node *node_lock(void) {
    const char *wanted = node_folder();
    if (!wanted || !*wanted) return NULL;
    pthread_mutex_lock(&inner);
    map_folder(wanted);
    char path[1100];
    snprintf(path, sizeof path, "%s/lock", folder);
    outer = open_shared(path, 0);
    while (flock(outer, LOCK_EX))
        if (errno != EINTR) refuse("cannot lock", path);
    bury();
    return table;
}

void node_unlock(void) {
    close(outer); /* and with it the lock: a descriptor of its own each time, so that none is left to be inherited */
    pthread_mutex_unlock(&inner);
}
