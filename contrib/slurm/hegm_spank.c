/* SPANK plugin: `srun --hegm` and `sbatch --hegm` run each task by `hegmctl run --slurm`. See README.md.
 *
 *   gcc -shared -fPIC -O2 -o hegm_spank.so hegm_spank.c
 *   plugstack.conf:  optional /usr/lib/hegm/hegm_spank.so task=/usr/libexec/hegm/hegm-task grace=30
 *
 * A task becomes hegm-task, which becomes `hegmctl run --slurm -- COMMAND`. It is not run by the plugin itself: Slurm
 * has yet to run the TaskProlog and to set the limits of the user when it calls the plugin. So the plugin only puts
 * another program in the place of the command, and the command into the environment.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(hegm, 1);

#define TASK "/usr/libexec/hegm/hegm-task"

/* As hegm-task and hegmctl read them. */
#define COMMAND "HEGM_SLURM_COMMAND"
#define OPTIONS "HEGM_SLURM_OPTIONS"
#define GRACE "HEGM_SLURM_GRACE"

static int is_wanted;
static char options[1024];

/* The option was given: to srun or sbatch, and again in slurmstepd, which runs the task. */
static int on_option(int value, const char *argument, int is_remote)
{
    (void)value;
    (void)is_remote;
    if (argument != NULL && strlen(argument) >= sizeof(options)) {
        slurm_error("--hegm: more than %zu characters", sizeof(options) - 1);
        return -1;
    }
    is_wanted = 1;
    snprintf(options, sizeof(options), "%s", argument == NULL ? "" : argument);
    return 0;
}

static struct spank_option hegm = {
    .name = "hegm",
    .arginfo = "OPTIONS",
    .usage = "run the job so that hegmd can suspend it: as hegmctl run --slurm OPTIONS",
    .has_arg = 2, /* it may be left out */
    .val = 0,
    .cb = on_option,
};

/* The value of `name=value` among the words of plugstack.conf, or `otherwise`. */
static const char *word(const char *name, int count, char **words, const char *otherwise)
{
    size_t length = strlen(name);
    for (int i = 0; i < count; i++)
        if (strncmp(words[i], name, length) == 0 && words[i][length] == '=')
            return words[i] + length + 1;
    return otherwise;
}

int slurm_spank_init(spank_t spank, int count, char **words)
{
    (void)count;
    (void)words;
    spank_context_t context = spank_context();
    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return 0;
    return spank_option_register(spank, &hegm) == ESPANK_SUCCESS ? 0 : -1;
}

/* In the process of the task, as its user, before the TaskProlog and the limits. */
int slurm_spank_task_init(spank_t spank, int count, char **words)
{
    int given = 0;
    char **argv = NULL;
    const char *grace = word("grace", count, words, NULL);
    const char *task = word("task", count, words, TASK);

    if (!is_wanted)
        return 0;
    if (access(task, X_OK) != 0) {
        slurm_spank_log("--hegm: %s: %m; the job runs without hegmd", task);
        return 0;
    }
    if (spank_get_item(spank, S_JOB_ARGV, &given, &argv) != ESPANK_SUCCESS || given < 1 || argv[0] == NULL) {
        slurm_spank_log("--hegm: the command is not known; the job runs without hegmd");
        return 0;
    }
    if (spank_setenv(spank, COMMAND, argv[0], 1) != ESPANK_SUCCESS ||
        spank_setenv(spank, OPTIONS, options, 1) != ESPANK_SUCCESS ||
        (grace != NULL && spank_setenv(spank, GRACE, grace, 1) != ESPANK_SUCCESS)) {
        slurm_spank_log("--hegm: the environment cannot be set; the job runs without hegmd");
        return 0;
    }
    argv[0] = strdup(task);
    return argv[0] == NULL ? -1 : 0;
}
