/* What all processes on the stub's node share: who uses which GPU, which video memory there is, and mailboxes.
 *
 * It lives in the folder that HEGM_CUDA_STUB names: `node` is the table below, mapped by everybody and changed under
 * a lock on the file `lock`; `memory/ID` is one piece of video memory, a real file with real content. The stub of
 * libnvidia-ml is built with this too, so that both libraries tell the same.
 *
 * A piece of video memory lives as long as somebody holds it, and the kernel says whether somebody does: every holder
 * has a shared flock on its own open file of `memory/ID`. An open file lives on in duplicates of its descriptor, in
 * messages on their way through a socket, in mappings; with the last of these the lock is gone, whoever was killed.
 */
#ifndef HEGM_STUB_NODE_H
#define HEGM_STUB_NODE_H

#include <stdint.h>
#include <sys/types.h>

enum { NODE_GPUS = 16, NODE_PROCESSES = 256, NODE_PIECES = 1 << 16 };

/* What is asked of the driver's thread in a process. */
enum ask { ASK_STATE = 1, ASK_LOCK, ASK_CHECKPOINT, ASK_RESTORE, ASK_UNLOCK };

struct node_process {
    pid_t pid; /* 0: a free place */
    uint64_t start_ticks;
    pid_t thread;                      /* the driver's, which does what is asked */
    int is_out;                        /* checkpointed: neither its contexts nor itself are on any GPU */
    int was_out;                       /* ever: it may be in an image */
    uint64_t context_bytes[NODE_GPUS]; /* of its contexts, by GPU; 0 where it has none */
    /* The mailbox. `asked` is counted up by the caller once the request is in, `answered` by the process once the
     * result is; both are futexes. Whoever finds them unequal waits: a killed caller's step goes on. */
    uint32_t asked, answered;
    int ask, results[8]; /* by request, so that the next caller does not overwrite what was not read yet */
    unsigned int timeout_ms;
    int has_map, map[NODE_GPUS];
};

struct node_piece {
    uint64_t id; /* 0: a free place */
    uint64_t bytes;
    pid_t owner; /* 0: none any more; it lives as long as it is held */
    uint64_t owner_start_ticks;
    int gpu;
    int is_shared; /* others may hold it too */
};

struct node {
    uint64_t last_id;
    int pieces_top;
    struct node_process processes[NODE_PROCESSES];
    struct node_piece pieces[NODE_PIECES];
};

/* The table, locked for this thread and rid of the dead; NULL where HEGM_CUDA_STUB names no folder. */
struct node *node_lock(void);
void node_unlock(void);

/* ---- under the lock ---- */

struct node_process *node_find(pid_t pid);
struct node_process *node_join(void); /* this process's place; made when there is none */
/* One that came out of an image, checkpointed as it went in, is the same process with another start time. */
void node_revive(struct node_process *process);
int node_lives(pid_t pid, uint64_t start_ticks);
uint64_t node_used_bytes(int gpu);
uint64_t node_used_bytes_by(const struct node_process *process, int gpu);

/* A new piece with an open file that holds it; -1 when there is no place for it. */
int node_make_piece(int gpu, uint64_t bytes, uint64_t *id);
/* Another open file that holds it; -1 when nobody holds it any more. */
int node_hold_piece(uint64_t id, struct node_piece *found);
/* An open file of it that does not hold it; -1 when there is none. */
int node_open_piece(uint64_t id);
void node_share_piece(uint64_t id);
void node_drop_piece(uint64_t id); /* its owner gives it up */

/* ---- at any time ---- */

/* The id of the piece that this descriptor holds; 0 for any other descriptor. */
uint64_t node_piece_of(int fd);
const char *node_folder(void);
uint64_t node_start_ticks(pid_t pid, char *state); /* 0: no such process */

#endif
