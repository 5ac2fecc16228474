"""Commands that move jobs, and follow what becomes of that."""

from __future__ import annotations

from hegmctl.grammar.rows import AFTER_PROGRESS, ONE, Command, CommandForm
from hegmctl.grammar.words import FILES, JOB, JOBS, PATH, PLACES, TEXT, Argument, Option, RequestField

_OPERATION = "operating_text:operation_text"
_SPILL = RequestField("spill", doc="keep the bytes on disk, with checksums, until `resume`")
_KEEP_CONTEXT = RequestField(
    "keep_context", doc="the job keeps its CUDA context on its GPU: faster, no driver call, resumes on that GPU only"
)

MOVING = (
    Command(
        "migrate",
        "move running jobs to another GPU",
        "Quiesces the job between two batches, moves it and resumes it; it is done when the next batch has run. If a "
        "step fails, the job is rolled back and runs where it was. Ctrl-C asks whether to roll back or to let it "
        "finish. A GPU is named by its id, its number, `cuda:1`, its UUID or its PCI address. For a process on several "
        "GPUs, --to takes a GPU for each, in the order of `hegmctl ps`, or OLD=NEW pairs.",
        request="migrate",
        render=_OPERATION,
        handler="move_commands:migrate",
        options=(
            RequestField("to", complete=PLACES, doc="target GPU, or cpu; GPU,GPU or OLD=NEW"),
            RequestField("via", metavar="WAY", choices=("restart",), doc="move by a restart from its saved state"),
            RequestField("allow_restart", doc="allow a restart if no other method is possible"),
            RequestField(
                "unset",
                names=("--env",),
                metavar="NAME=VALUE",
                doc="set this variable for the restart; NAME alone unsets it",
            ),
            RequestField("python", kind=PATH, metavar="PATH", complete=FILES, doc="restart with this Python"),
        ),
        examples=(
            ("hegmctl migrate train --to gpu1", "move the job `train`"),
            ("hegmctl migrate 4711 --to 1", "move the job of process 4711"),
            ("hegmctl migrate 4711 --to gpu1 --dry-run", "show the plan only"),
            ("hegmctl migrate 4711 --to gpu1 --carrier host", "copy through the pool, even if NVLink is faster"),
            ("hegmctl migrate 4711 --to gpu2,gpu3", "move process 4711, which is on gpu0 and gpu1"),
            ("hegmctl migrate 4711 --to gpu0=gpu2", "move only its part on gpu0"),
            (
                "hegmctl migrate 4711 --via restart --to gpu1 --python /opt/rocm/bin/python3",
                "to another vendor, with a Python that can use it",
            ),
            ("hegmctl migrate 4711 --via restart --to cpu", "continue on the CPU; --to gpu0 moves it back"),
        ),
    ),
    Command(
        "suspend",
        "suspend running jobs and free their GPUs",
        "Quiesces the job between two batches and keeps its bytes in the pool until `resume`; meanwhile its GPU "
        "memory is free. With --spill the bytes are written to disk and take no host memory either; this also works "
        "for a job that is already suspended. If the disk is full, they stay in memory, and the command fails. With "
        "--keep-context only the job's tensors leave the GPU: no driver call is made, so this also works with drivers "
        "before 570, under MIG and MPS, and NCCL communicators stay connected. --dry-run says what stays on the GPU. "
        "The job can resume on the same GPU only.",
        request="suspend",
        render=_OPERATION,
        options=(_SPILL, _KEEP_CONTEXT),
        examples=(
            ("hegmctl suspend train", "free the GPU of the job `train`"),
            ("hegmctl suspend --keep-context 4711", "free all but its CUDA context, about 0.5 GiB"),
            ("hegmctl suspend --spill 4711", "and keep its bytes on disk"),
        ),
    ),
    Command(
        "quiesce",
        "park running jobs between two batches",
        "Parks the job at its next boundary and leaves its memory in place; it is done when the job is parked. After "
        "--hold seconds, or with `resume`, the job resumes. Other commands meanwhile, such as `offload`, `checkpoint` "
        "or `migrate`, start from that boundary.",
        request="quiesce",
        render=_OPERATION,
        options=(
            RequestField("hold_s", doc="resume it automatically after this time; default: 60"),
            RequestField("wait", doc="do not wait until the job is parked; `hegmctl op` shows it"),
        ),
        examples=(
            ("hegmctl quiesce 4711 --timeout 30 --hold 300", "at a boundary within 30 s, for 5 minutes at most"),
        ),
    ),
    Command(
        "offload",
        "suspend running jobs, as one step of several",
        "The step between `quiesce` and `handoff`; the same as `suspend`. --timeout limits the wait for a boundary of "
        "a job that is not parked yet.",
        request="suspend",
        render=_OPERATION,
        options=(_SPILL,),
    ),
    Command(
        "handoff",
        "write a suspended job into an image on disk",
        "The second half of `checkpoint`, for a suspended job. Its processes end once the image is verified; if that "
        "fails, or takes longer than --timeout, the job stays suspended and no image is left.",
        request="handoff",
        render=_OPERATION,
        arguments=(RequestField("pid"), RequestField("path", doc="directory of the image; it must not exist yet")),
        examples=(("hegmctl handoff 4711 /images/train --timeout 600", "within ten minutes, or not at all"),),
    ),
    Command(
        "resume",
        "resume a suspended or quiesced job",
        "It is done when the next batch has run. If its bytes are not reloaded within --timeout, it is suspended "
        "again. With --queue a suspended job waits like a new one until a GPU has room, for --timeout at most. It "
        "resumes then even if the command was interrupted; `hegmctl suspend` takes it out of the queue.",
        request="resume",
        render=_OPERATION,
        options=(
            RequestField(
                "to", complete=PLACES, doc="target GPU; default: its former one, or a healthy one in its place"
            ),
            RequestField("queue", doc="if no GPU has room for it, wait in the queue of `hegmctl queue`"),
        ),
        arguments=(RequestField("pid", complete=""),),
        examples=(
            ("hegmctl resume 4711 --to gpu1", "resume it on gpu1"),
            ("hegmctl resume train --queue", "resume it as soon as a GPU has room"),
        ),
    ),
    Command(
        "drain",
        "move everything off a GPU",
        "Moves one job after the other to a suitable GPU, and prints a summary. Only processes on that GPU move; the "
        "others of their jobs wait.",
        exits="The exit status is that of the first job that was not moved.",
        request="drain",
        render="operating_text:drained_text",
        handler="move_commands:drain",
        options=(
            RequestField("to", splits=True, doc="target GPUs; default: any"),
            RequestField("wait", doc="start all moves at once and do not wait; `hegmctl ops` shows them"),
        ),
        interrupted="; the jobs after it stay",
        examples=(("hegmctl drain gpu0 --to gpu1,gpu2", "empty gpu0 before its maintenance"),),
    ),
    Command(
        "swap",
        "exchange the GPUs of two jobs",
        "If both do not fit on one GPU, the first waits in the pool while the second moves. The daemon finishes a "
        "swap even if hegmctl is interrupted.",
        request="swap",
        render="operating_text:swapped_text",
        options=(RequestField("wait", doc="do not wait for the end; the daemon carries out the later steps"),),
        arguments=(
            RequestField("first", name="JOB", kind=JOB, complete=JOBS),
            RequestField("second", name="OTHER", kind=JOB, complete=JOBS),
        ),
        interrupted="; the swap is carried out by the daemon: see `hegmctl ops`",
        examples=(("hegmctl swap 4711 4712", "move each job to the GPU of the other"),),
    ),
    Command(
        "ops",
        "show the operations, and what needs your attention",
        "Running and suspended operations, and the latest that ended; below them orphaned processes and memory, each "
        "with the command that handles it.",
        request="operations",
        render="operating_text:operations_text",
    ),
    Command(
        "op",
        "show one operation and its story",
        request="operation",
        handler="move_commands:op",
        forms=(
            CommandForm(request="operation", prints=ONE, call="story"),
            CommandForm("--follow", request="operation", prints=AFTER_PROGRESS, call=""),
        ),
        options=(
            RequestField(
                "follow", names=("-f", "--follow"), doc="wait until it ends or is suspended, and show its progress"
            ),
            Option(
                "--story", doc="show every event of the operation: when, how long it took, and what each process did"
            ),
            Option(
                "--timeline",
                doc="draw it as bars, a lane each for job, agent, daemon, helper, driver and copies; with sizes and "
                "speeds",
            ),
            Option(
                "--svg",
                kind=PATH,
                metavar="FILE",
                complete=FILES,
                doc="with --timeline: write the drawing to FILE, for light and dark pages",
            ),
            Option(
                "--html",
                kind=PATH,
                metavar="FILE",
                complete=FILES,
                doc="with --timeline: write a page to FILE that any browser opens, without a network",
            ),
        ),
        examples=(
            ("hegmctl op 4 --timeline", "the durations of the steps of operation 4"),
            ("hegmctl op 4 --timeline --html move.html", "the same, as a page for a browser"),
        ),
    ),
    Command(
        "cancel",
        "cancel an operation and roll it back",
        "Rolls the job back. Refused when finishing takes less time than a rollback. With --drop, discards the saved "
        "state of a restart and frees its memory, or ends ranks that could not connect again; this cannot be undone.",
        request="operation.cancel",
        handler="move_commands:cancel",
        forms=(CommandForm(request="operation.cancel", call="cancel"),),
        options=(
            RequestField("drop", doc="discard the saved state of a process that has exited, or end suspended ranks"),
            Option("-y", "--yes", doc="do not ask for confirmation"),
        ),
        examples=(("hegmctl cancel 4 --drop", "discard the saved state of operation 4"),),
    ),
    Command(
        "adopt",
        "resume orphaned jobs, or list them",
        "Without a JOB, lists orphans: parked processes, processes that the CUDA driver has locked or checkpointed, "
        "and bytes in memory or on disk, if no operation owns them. With a JOB, makes an operation of its "
        "processes, and resumes them. Nothing is deleted without --drop.",
        request="adopt",
        handler="move_commands:adopt",
        forms=(
            CommandForm(request="orphans", render="operating_text:orphans_text"),
            CommandForm("JOB", request="adopt", render=_OPERATION),
            CommandForm("--drop", request="orphans.drop", render="operating_text:dropped_text", call="drop_orphan"),
        ),
        options=(
            RequestField("to", doc="target GPU; default: the job's own"),
            Option("--drop", kind=TEXT, metavar="NAME", doc="delete these bytes"),
            Option("-y", "--yes", doc="do not ask for confirmation"),
        ),
        arguments=(Argument("JOB", many=True, kind=JOB, doc="the job: its id, its name, or a pid of it", field="pid"),),
        examples=(("hegmctl adopt", "what there is"), ("hegmctl adopt 4711 --to gpu0", "resume process 4711 on gpu0")),
    ),
)
