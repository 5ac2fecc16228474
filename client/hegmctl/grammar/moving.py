"""Commands that start jobs, move them, and follow what becomes of that."""

from __future__ import annotations

from hegmctl.grammar.recovering import RECOVERY
from hegmctl.grammar.rows import AFTER_PROGRESS, ONE, Command, Form
from hegmctl.grammar.sharing import PRIORITIES, SLURM
from hegmctl.grammar.words import (
    FILES,
    JOB,
    JOBS,
    PATH,
    PID,
    PIDS,
    PLACES,
    POSITIVE,
    SECONDS,
    SIZE,
    TEXT,
    Argument,
    Of,
    Option,
)

_OPERATION = "operating_text:operation_text"
_SPILL = Of("spill", doc="keep the bytes on disk, with checksums, until `resume`")
_KEEP_CONTEXT = Of(
    "keep_context",
    doc="the job keeps its CUDA context on its GPU: faster, no driver call, resumes on that GPU only",
)
_HEGM = (Form(record="hegmctl.answers:HegmAnswer"),)
# When the next Python of a restart imports PyTorch.
READY_WHEN = ("in-turn", "beforehand", "always")
NVLS = ("off", "keep")

_VENV = Option("--venv", kind=PATH, metavar="DIR", complete=FILES, doc="the virtual environment; default: VIRTUAL_ENV")
MOVING = (
    Command(
        "hegm enable",
        "let every training in a virtual environment save its state at SIGUSR1",
        "As after `pip install hegm`: `python train.py` needs no launcher. SIGUSR1 saves the state at the next batch "
        "boundary to HEGM_CHECKPOINT_PATH, else /checkpoint/latest.pt, and ends the training with HEGM_EXIT_CODE, else "
        "99; the same command in the same folder continues from there. Adds two files to the environment. A Python "
        "that imports no PyTorch is not affected.",
        handler="enabling:enable",
        forms=_HEGM,
        options=(_VENV,),
        examples=(("hegmctl hegm enable --venv .venv", "then: .venv/bin/python train.py & kill -USR1 $!"),),
    ),
    Command(
        "hegm disable",
        "undo `hegm enable`",
        "Removes the two files, and nothing else.",
        handler="enabling:disable",
        forms=_HEGM,
        options=(_VENV,),
    ),
    Command(
        "hegm status",
        "show whether `hegm enable` is active in an environment",
        handler="enabling:status",
        forms=_HEGM,
        options=(_VENV,),
    ),
    Command(
        "run",
        "run a command so that it can be moved",
        "Becomes the command, with hegmd's agent in every Python that it starts. Nothing is installed and no line of "
        "the script changes; exit status, signals, terminal and process group are the command's own. As in a shell, "
        "the exit status is 127 if the command is not found, and 126 if it cannot be run. If no daemon runs, starts "
        "one for this user's processes, which exits after its last job. With --allow-restart or --slurm it stays as "
        "the command's parent and passes on signals and exit status; if it is killed, the command keeps running.",
        handler="running:run",
        forms=(Form("--recover --dry-run", record="hegmctl.answers:RecoveryPlan"),),
        options=(
            Option(
                "--gpu",
                kind=TEXT,
                metavar="GPU",
                complete=PLACES,
                doc="the only GPUs that the command sees, or cpu; overrides CUDA_VISIBLE_DEVICES. With auto, hegmd "
                "chooses one, and the job waits in the queue until one has room",
            ),
            Option(
                "--bytes",
                kind=SIZE,
                metavar="SIZE",
                doc="how much GPU memory the job will need: it waits until so much is free for it. Without, --gpu auto "
                "chooses a GPU without other jobs",
            ),
            Option(
                "--priority",
                kind=TEXT,
                metavar="PRIORITY",
                choices=PRIORITIES,
                doc="production, normal (default), best-effort, or 0 to 100: jobs of lower priority are suspended "
                "for those of higher",
            ),
            Option(
                "--name",
                kind=TEXT,
                metavar="NAME",
                doc="name of the job; default: that of its script. A number is added while another job has the name: "
                "train, train-2",
            ),
            Option(
                "--checkpoint-every",
                kind=SECONDS,
                metavar="TIME",
                doc="write an image of the job at this interval, between two batches",
            ),
            Option("--keep", kind=POSITIVE, metavar="NUMBER", doc="number of newest images to keep; default: 3"),
            Option(
                "--dir",
                kind=PATH,
                metavar="DIR",
                complete=FILES,
                doc="directory of the images; created if it does not exist",
            ),
            Option(
                "--allow-restart",
                doc="stay as the command's parent, so that hegmd can restart it between two batches: on a GPU of "
                "another vendor or chip, or with another environment or Python; same as HEGM_ALLOW_RESTART=1",
            ),
            *RECOVERY,
            SLURM,
            Option(
                "--ready",
                kind=TEXT,
                metavar="WHEN",
                choices=READY_WHEN,
                doc="when the next Python of a restart imports PyTorch: in-turn, while the job is parked; beforehand, "
                "once a restart is requested, while the job trains for at most 15 s; or always, from its first "
                "batch on, which is fastest and takes about 0.5 GB of memory; default: the daemon's setting",
            ),
            Option(
                "--nvls",
                kind=TEXT,
                metavar="HOW",
                choices=NVLS,
                doc="multicast by NVLink in NCCL: off, as the driver cannot checkpoint its memory; or keep, and then "
                "ranks on several GPUs cannot be moved; off if not given and NCCL_NVLS_ENABLE is not set",
            ),
            Option(
                "--resume",
                kind=TEXT,
                metavar="ID",
                doc="continue from the saved state of a suspended operation, or with --recover from the last snapshot "
                "of a job",
            ),
            Option(
                "--simulate",
                kind=TEXT,
                metavar="SPEC",
                doc="simulated GPUs for a daemon that is started, such as 2x8GiB",
            ),
            Option("--no-daemon-start", doc="start no daemon; the agent connects when one starts"),
        ),
        tail="COMMAND",
        examples=(
            ("hegmctl run python3 train.py", "a training that can be moved, suspended and resumed"),
            ("hegmctl run --gpu gpu1 --name llama torchrun train.py", "its ranks move as one, as the job `llama`"),
            (
                "hegmctl run --gpu auto --bytes 20GiB --priority best-effort -- python3 train.py",
                "wait for a GPU with 20 GiB, and leave it for others",
            ),
            (
                "hegmctl run --allow-restart -- python3 train.py",
                "a training that can also be restarted elsewhere",
            ),
            ("hegmctl run --recover -- python3 train.py", "a training that survives the end of its process"),
            (
                "hegmctl run --checkpoint-every 10min --dir /images -- python3 train.py",
                "keep its last three images in /images",
            ),
        ),
    ),
    Command(
        "attach",
        "load the agent into a running training",
        "For a training that was started without `hegmctl run`, in CPython 3.14 or later: its Python is asked to load "
        "hegmd's agent between two instructions (PEP 768). Afterwards it can be moved, suspended and saved as any "
        "other job. It cannot be restarted, because the agent does not know how the script began. For a launcher such "
        "as torchrun, the agent goes to each of its ranks. Takes the caller's own processes; as root, those of any "
        "user. A process for which it is refused is not changed.",
        exits="The exit status is 0 when every agent has connected to the daemon, and 15 when one has not within 10 s.",
        handler="attaching:attach",
        forms=(Form(record="hegmctl.answers:AttachAnswer"),),
        options=(Option("--name", kind=TEXT, metavar="NAME", doc="name of the job"),),
        arguments=(
            Argument("PID", many=True, kind=PID, complete=PIDS, doc="the processes of one training, or its launcher"),
        ),
        examples=(
            ("hegmctl attach 4711", "then, for example: hegmctl migrate 4711 --to gpu1"),
            ("hegmctl attach --timeout 300 4711", "wait up to 5 minutes for its main thread"),
        ),
    ),
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
            Of("to", complete=PLACES, doc="target GPU, or cpu; GPU,GPU or OLD=NEW"),
            Of("via", metavar="WAY", choices=("restart",), doc="move by a restart from its saved state"),
            Of("allow_restart", doc="allow a restart if no other method is possible"),
            Of(
                "unset",
                names=("--env",),
                metavar="NAME=VALUE",
                doc="set this variable for the restart; NAME alone unsets it",
            ),
            Of("python", kind=PATH, metavar="PATH", complete=FILES, doc="restart with this Python"),
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
            Of("hold_s", doc="resume it automatically after this time; default: 60"),
            Of("wait", doc="do not wait until the job is parked; `hegmctl op` shows it"),
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
        arguments=(
            Of("pid"),
            Of("path", doc="directory of the image; it must not exist yet"),
        ),
        examples=(("hegmctl handoff 4711 /images/train --timeout 600", "within ten minutes, or not at all"),),
    ),
    Command(
        "resume",
        "resume a suspended or quiesced job",
        "It is done when the next batch has run. If its bytes are not reloaded within --timeout, it is suspended "
        "again.",
        request="resume",
        render=_OPERATION,
        options=(Of("to", complete=PLACES, doc="target GPU; default: its former GPU"),),
        arguments=(Of("pid", complete=""),),
        examples=(("hegmctl resume 4711 --to gpu1", "resume it on gpu1"),),
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
            Of("to", splits=True, doc="target GPUs; default: any"),
            Of("wait", doc="start all moves at once and do not wait; `hegmctl ops` shows them"),
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
        options=(Of("wait", doc="do not wait for the end; the daemon carries out the later steps"),),
        arguments=(
            Of("first", name="JOB", kind=JOB, complete=JOBS),
            Of("second", name="OTHER", kind=JOB, complete=JOBS),
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
            Form(request="operation", prints=ONE, call="story"),
            Form("--follow", request="operation", prints=AFTER_PROGRESS, call=""),
        ),
        options=(
            Of("follow", names=("-f", "--follow"), doc="wait until it ends or is suspended, and show its progress"),
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
        "state of a restart and frees its memory; this cannot be undone.",
        request="operation.cancel",
        handler="move_commands:cancel",
        forms=(Form(request="operation.cancel", call="cancel"),),
        options=(
            Of("drop", doc="discard the saved state of a process that has exited"),
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
            Form(request="orphans", render="operating_text:orphans_text"),
            Form("JOB", request="adopt", render=_OPERATION),
            Form("--drop", request="orphans.drop", render="operating_text:dropped_text", call="drop_orphan"),
        ),
        options=(
            Of("to", doc="target GPU; default: the job's own"),
            Option("--drop", kind=TEXT, metavar="NAME", doc="delete these bytes"),
            Option("-y", "--yes", doc="do not ask for confirmation"),
        ),
        arguments=(Argument("JOB", many=True, kind=JOB, doc="the job: its id, its name, or a pid of it", field="pid"),),
        examples=(
            ("hegmctl adopt", "what there is"),
            ("hegmctl adopt 4711 --to gpu0", "resume process 4711 on gpu0"),
        ),
    ),
)
