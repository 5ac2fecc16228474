"""Commands that start jobs, or make running trainings jobs."""

from __future__ import annotations

from hegmctl.grammar.recovering import RECOVERY
from hegmctl.grammar.rows import Command, CommandForm
from hegmctl.grammar.sharing import PRIORITIES, SLURM
from hegmctl.grammar.words import FILES, PATH, PID, PIDS, PLACES, POSITIVE, SECONDS, SIZE, TEXT, Argument, Option

_HEGM = (CommandForm(record="hegmctl.answers:HegmAnswer"),)
# When the next Python of a restart imports PyTorch.
READY_WHEN = ("in-turn", "beforehand", "always")
NVLS = ("off", "keep")

_VENV = Option("--venv", kind=PATH, metavar="DIR", complete=FILES, doc="the virtual environment; default: VIRTUAL_ENV")

STARTING = (
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
        forms=(CommandForm("--recover --dry-run", record="hegmctl.answers:RecoveryPlan"),),
        options=(
            Option(
                "--gpu",
                kind=TEXT,
                metavar="GPU",
                complete=PLACES,
                doc="the only GPUs that the command sees, or cpu; overrides CUDA_VISIBLE_DEVICES. With auto, hegmd "
                "chooses one, and the job waits in the queue until one has room; with auto:4 it gets four of one chip "
                "at once. With --ranks, auto is one GPU for each rank",
            ),
            Option(
                "--bytes",
                kind=SIZE,
                metavar="SIZE",
                doc="how much GPU memory the job will need on each GPU: it waits until this much is free. Without, "
                "--gpu auto chooses GPUs without other jobs",
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
                "hegmctl run --gpu auto:4 -- torchrun --nproc-per-node 4 train.py",
                "wait for four GPUs without other jobs, one per rank",
            ),
            ("hegmctl run --allow-restart -- python3 train.py", "a training that can also be restarted elsewhere"),
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
        forms=(CommandForm(record="hegmctl.answers:AttachAnswer"),),
        options=(Option("--name", kind=TEXT, metavar="NAME", doc="name of the job"),),
        arguments=(
            Argument("PID", many=True, kind=PID, complete=PIDS, doc="the processes of one training, or its launcher"),
        ),
        examples=(
            ("hegmctl attach 4711", "then, for example: hegmctl migrate 4711 --to gpu1"),
            ("hegmctl attach --timeout 300 4711", "wait up to 5 minutes for its main thread"),
        ),
    ),
)
