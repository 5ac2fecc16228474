/* A stub of NCCL for tests of the agent: it keeps of each communicator whether its memory is suspended, refuses a
 * call in the wrong order as NCCL does, and writes each call into the file that HEGM_NCCL_STUB_LOG names.
 *
 * A communicator is a number from 1 to COMMUNICATORS in a pointer's place. HEGM_NCCL_STUB_VERSION is the version it
 * tells, 22907 if not set; HEGM_NCCL_STUB_FAILS the code that suspending and resuming answer, and then do nothing.
 */
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { COMMUNICATORS = 16, SUSPEND_MEMORY = 1 };

static int is_suspended[COMMUNICATORS + 1];

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int noted(const char *call, long communicator, int code) {
    const char *path = getenv("HEGM_NCCL_STUB_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s %ld %d\n", call, communicator, code);
        fclose(log);
    }
    return code;
}

int ncclGetVersion(int *version) {
    *version = number_from("HEGM_NCCL_STUB_VERSION", 22907);
    return SUCCESS;
}

const char *ncclGetErrorString(int code) {
    return code == INVALID_USAGE ? "invalid usage" : code == INVALID_ARGUMENT ? "invalid argument" : "internal error";
}

static int change(const char *call, void *pointer, int to) {
    long communicator = (long)pointer;
    int fails = number_from("HEGM_NCCL_STUB_FAILS", 0);
    if (fails)
        return noted(call, communicator, fails);
    if (communicator < 1 || communicator > COMMUNICATORS)
        return noted(call, communicator, INVALID_ARGUMENT);
    if (is_suspended[communicator] == to)
        return noted(call, communicator, INVALID_USAGE);
    is_suspended[communicator] = to;
    return noted(call, communicator, SUCCESS);
}

int ncclCommSuspend(void *communicator, int flags) {
    if (flags != SUSPEND_MEMORY)
        return noted("suspend", (long)communicator, INVALID_ARGUMENT);
    return change("suspend", communicator, 1);
}

int ncclCommResume(void *communicator) { return change("resume", communicator, 0); }
