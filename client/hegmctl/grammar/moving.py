"""Commands that start jobs, move them, and follow what becomes of that."""

from __future__ import annotations

from hegmctl.grammar.rows import AFTER_PROGRESS, ONE, Form, Verb
from hegmctl.grammar.words import FILES, PATH, PID, PIDS, PLACES, POSITIVE, SECONDS, TEXT, Argument, Of, Option

_OPERATION = "operating_text:operation_text"
_SPILL = Of("spill", doc="have the bytes on disk, with checksums, until `resume`")
_HEGM = (Form(record="hegmctl.answers:HegmAnswer"),)
# When the next Python of a restart imports PyTorch.
READY_WHEN = ("in-turn", "beforehand", "always")
NVLS = ("off", "keep")

_VENV = Option("--venv", kind=PATH, metavar="DIR", complete=FILES, doc="the environment; else the one in VIRTUAL_ENV")
MOVING = (
    Verb(
        "hegm enable",
        "have every Python of an environment that trains save its state at SIGUSR1",
        "As after `pip install hegm`: `python train.py` needs no launcher. SIGUSR1 saves the state at the next batch "
        "boundary to HEGM_CHECKPOINT_PATH, else /checkpoint/latest.pt, and ends the training with HEGM_EXIT_CODE, else "
        "99; the same command in the same folder goes on from there. Two files are added to the environment. A Python "
        "that imports no PyTorch is left alone.",
        handler="enabling:enable",
        forms=_HEGM,
        options=(_VENV,),
        examples=(("hegmctl hegm enable --venv .venv", "then: .venv/bin/python train.py & kill -USR1 $!"),),
    ),
    Verb(
        "hegm disable",
        "take that away again",
        "Removes the two files, and nothing else.",
        handler="enabling:disable",
        forms=_HEGM,
        options=(_VENV,),
    ),
    Verb("hegm status", "show whether an environment has it", handler="enabling:status", forms=_HEGM, options=(_VENV,)),
    Verb(
        "run",
        "run a command so that it can be moved",
        "Becomes the command, with hegmd's agent in every Python that it starts. Nothing is installed and no line of "
        "the script changes; exit status, signals, terminal and process group are the command's own. One that is "
        "not found ends with 127, and one that cannot be run with 126, as in a shell. Without a daemon one is started "
        "for this user's own processes, which ends when its last job has. With --allow-restart it stays as the "
        "command's parent: signals and exit status are passed on, and killed, it leaves the command running.",
        handler="running:run",
        options=(
            Option(
                "--gpu",
                kind=TEXT,
                metavar="GPU",
                complete=PLACES,
                doc="the only GPUs that it sees, or cpu; before CUDA_VISIBLE_DEVICES",
            ),
            Option(
                "--name", kind=TEXT, metavar="NAME", doc="what to call the job; two runs of one name are still two jobs"
            ),
            Option(
                "--checkpoint-every",
                kind=SECONDS,
                metavar="TIME",
                doc="have an image of the job taken every so often, between two batches, while it runs",
            ),
            Option("--keep", kind=POSITIVE, metavar="NUMBER", doc="of these, keep the newest so many; 3 if not given"),
            Option(
                "--dir", kind=PATH, metavar="DIR", complete=FILES, doc="the directory that they are in; made if need be"
            ),
            Option(
                "--allow-restart",
                doc="stay as the command's parent, so that it can leave between two batches and be started again on a "
                "GPU of another vendor or chip, with another environment or Python; HEGM_ALLOW_RESTART=1 does the same",
            ),
            Option(
                "--restart-tries", kind=POSITIVE, metavar="NUMBER", doc="start it so often in a place; 2 if not given"
            ),
            Option(
                "--ready",
                kind=TEXT,
                metavar="WHEN",
                choices=READY_WHEN,
                doc="when the next Python of a restart imports PyTorch: in-turn, while the job stands; beforehand, "
                "once one is asked for, the job training on for 15 s at most; or always, from its first batch on, "
                "which is the soonest and takes some 0.5 GB of memory; as the daemon is configured if not given",
            ),
            Option(
                "--nvls",
                kind=TEXT,
                metavar="HOW",
                choices=NVLS,
                doc="multicast by NVLink in NCCL: off, as the driver cannot checkpoint its memory; or keep, and then "
                "ranks on several GPUs cannot be moved; off if not given and NCCL_NVLS_ENABLE is not set",
            ),
            Option("--resume", kind=TEXT, metavar="ID", doc="begin from the state that a suspended operation holds"),
            Option("--simulate", kind=TEXT, metavar="SPEC", doc="if a daemon is started, with such GPUs: 2x8GiB"),
            Option("--no-daemon-start", doc="start no daemon; the agent looks out for one"),
        ),
        tail="COMMAND",
        examples=(
            ("hegmctl run -- python3 train.py", "a training that can be moved, suspended and resumed"),
            ("hegmctl run --gpu gpu1 -- torchrun train.py", "its ranks move as one"),
            (
                "hegmctl run --allow-restart -- python3 train.py",
                "one that can be started again elsewhere too",
            ),
            (
                "hegmctl run --checkpoint-every 10min --dir /images -- python3 train.py",
                "the last three images of it are in /images",
            ),
        ),
    ),
    Verb(
        "migrate",
        "move running jobs to another GPU",
        "Stops the job between two batches, moves it, and lets it go on; done means that its next batch was seen. "
        "Whatever fails, the job ends up running where it was. Ctrl-C asks whether to turn back or to leave it going. "
        "Of a process on several GPUs, --to names one for each, as `hegmctl ps` has them, or which takes whose place.",
        request="migrate",
        render=_OPERATION,
        handler="move_commands:migrate",
        options=(
            Of("to", complete=PLACES, doc="the GPU to go to, or cpu; GPU,GPU or OLD=NEW"),
            Of("via", metavar="WAY", choices=("restart",), doc="leave, and be started again from its state"),
            Of("allow_restart", doc="let it be a restart where there is no better way"),
            Of("unset", names=("--env",), metavar="NAME=VALUE", doc="restart with it so; NAME alone: without it"),
            Of("python", kind=PATH, metavar="PATH", complete=FILES, doc="restart with this Python"),
        ),
        examples=(
            ("hegmctl migrate 4711 --to gpu1", "move process 4711, and the others of its job"),
            ("hegmctl migrate 4711 --to gpu1 --dry-run", "what that would take"),
            ("hegmctl migrate 4711 --to gpu1 --carrier host", "by way of the pool, also where NVLink is faster"),
            ("hegmctl migrate 4711 --to gpu2,gpu3", "move process 4711, which is on gpu0 and gpu1"),
            ("hegmctl migrate 4711 --to gpu0=gpu2", "move what it has on gpu0 only"),
            (
                "hegmctl migrate 4711 --via restart --to gpu1 --python /opt/rocm/bin/python3",
                "to another vendor, with a Python that can use it",
            ),
            ("hegmctl migrate 4711 --via restart --to cpu", "off the GPUs, training on; --to gpu0 brings it back"),
        ),
    ),
    Verb(
        "suspend",
        "take running jobs off their GPUs",
        "Stops the job between two batches and holds its bytes in the pool until `resume`; meanwhile its memory is "
        "free for others. With --spill the bytes go on to disk and take no memory either; that can be asked of a job "
        "that is suspended already. Where the disk has no room, they stay in memory, and the command fails.",
        request="suspend",
        render=_OPERATION,
        options=(_SPILL,),
        examples=(
            ("hegmctl suspend 4711", "take 4711 off its GPU"),
            ("hegmctl suspend --spill 4711", "and have its bytes on disk"),
        ),
    ),
    Verb(
        "quiesce",
        "let running jobs stand between two batches",
        "Stops the job at its next boundary and leaves all that it has where it is; it is done when the job stands. "
        "After --hold seconds the job goes on by itself, and before that with `resume`. What else is asked of it "
        "meanwhile, such as `offload`, `checkpoint` or `migrate`, begins from where it stands.",
        request="quiesce",
        render=_OPERATION,
        options=(
            Of("hold_s", doc="let it go on by itself after so long; 60 if not given"),
            Of("wait", doc="do not wait until it stands; `hegmctl op` shows it"),
        ),
        examples=(
            ("hegmctl quiesce 4711 --timeout 30 --hold 300", "at a boundary within 30 s, for 5 minutes at most"),
        ),
    ),
    Verb(
        "offload",
        "take running jobs off their GPUs: `suspend`, as one step of several",
        "The step between `quiesce` and `handoff`, or a `suspend` by itself: they are the same. --timeout is how long "
        "the wait for a boundary may take, of a job that does not stand at one already.",
        request="suspend",
        render=_OPERATION,
        options=(_SPILL,),
    ),
    Verb(
        "handoff",
        "write a suspended job into an image on disk",
        "The second half of `checkpoint`: of a job that is off its GPU already. Its processes end when the image was "
        "read back; if that cannot be, or takes longer than --timeout, the job stays suspended and no image is left.",
        request="handoff",
        render=_OPERATION,
        arguments=(
            Of("pid"),
            Of("path", doc="the directory that the image is to have; it must not be there yet"),
        ),
        examples=(("hegmctl handoff 4711 /images/train --timeout 600", "within ten minutes, or not at all"),),
    ),
    Verb(
        "resume",
        "let a suspended job go on, or one that only stands",
        "Done means that its next batch was seen. If its bytes are not back after --timeout, it is suspended again.",
        request="resume",
        render=_OPERATION,
        options=(Of("to", complete=PLACES, doc="the GPU to go on at; else where it was"),),
        arguments=(Of("pid", complete=""),),
        examples=(("hegmctl resume 4711 --to gpu1", "let it go on, on gpu1"),),
    ),
    Verb(
        "drain",
        "move everything off a GPU",
        "One job after the other, each to a GPU that takes it, with a summary at the end. Only processes on that GPU "
        "move; the others of their jobs stand by.",
        exits="The exit status is that of the first job that was not moved.",
        request="drain",
        render="operating_text:drained_text",
        handler="move_commands:drain",
        options=(
            Of("to", splits=True, doc="only to this GPU; else to any"),
            Of("wait", doc="begin all moves at once and wait for no end; `hegmctl ops` shows them"),
        ),
        interrupted="; the jobs after it stay",
        examples=(("hegmctl drain gpu0 --to gpu1,gpu2", "empty gpu0 before its maintenance"),),
    ),
    Verb(
        "swap",
        "let two jobs change places",
        "Where there is not room for one beside the other, the first waits in the pool while the second moves. Once "
        "begun it is carried out to its end, also when hegmctl is interrupted.",
        request="swap",
        render="operating_text:swapped_text",
        options=(Of("wait", doc="do not wait for the end; the steps after the first follow by themselves"),),
        arguments=(
            Of("first", name="PID", kind=PID, complete=PIDS),
            Of("second", name="OTHER", kind=PID, complete=PIDS),
        ),
        interrupted="; the swap is carried out by the daemon: see `hegmctl ops`",
        examples=(("hegmctl swap 4711 4712", "each goes where the other is"),),
    ),
    Verb(
        "ops",
        "show the operations, and what needs a person",
        "Those under way, the suspended, and the last ones that are over; below them what was found on the node and "
        "belongs to none, each with the command that does something about it.",
        request="operations",
        render="operating_text:operations_text",
    ),
    Verb(
        "op",
        "show one operation and its story",
        request="operation",
        handler="move_commands:op",
        forms=(
            Form(request="operation", prints=ONE, call="story"),
            Form("--follow", request="operation", prints=AFTER_PROGRESS, call=""),
        ),
        options=(
            Of("follow", names=("-f", "--follow"), doc="wait until it has come to rest, and show how it comes on"),
            Option("--story", doc="tell the story in full: when, how long it took, who, and what they did"),
        ),
    ),
    Verb(
        "cancel",
        "have an operation turned back",
        "The job is brought back to how it was. Refused where going on is shorter than going back. With --drop the "
        "state of a restart is given up that nobody has gone on from, and its memory given back: there is no way back.",
        request="operation.cancel",
        handler="move_commands:cancel",
        forms=(Form(request="operation.cancel", call="cancel"),),
        options=(
            Of("drop", doc="give up for good the state that it holds, whose process is gone"),
            Option("-y", "--yes", doc="do not ask before that"),
        ),
        examples=(("hegmctl cancel 4 --drop", "let go of the state that operation 4 holds"),),
    ),
    Verb(
        "adopt",
        "bring back what no operation has",
        "Without a PID, lists what was found on the node and belongs to no operation: processes that stand, or that "
        "the CUDA driver has locked or checkpointed, and bytes in memory or on disk. With a PID, makes an operation "
        "of that process and the others of its job and lets them go on. Nothing of it is ever deleted unless --drop "
        "says so.",
        request="adopt",
        handler="move_commands:adopt",
        forms=(
            Form(request="orphans", render="operating_text:orphans_text"),
            Form("PID", request="adopt", render=_OPERATION),
            Form("--drop", request="orphans.drop", render="operating_text:dropped_text", call="drop_orphan"),
        ),
        options=(
            Of("to", doc="the GPU to go on at; else the job's own"),
            Option("--drop", kind=TEXT, metavar="NAME", doc="give up these bytes for good"),
            Option("-y", "--yes", doc="do not ask before that"),
        ),
        arguments=(Argument("PID", many=True, kind=PID, doc="a process of the job", field="pid"),),
        examples=(
            ("hegmctl adopt", "what there is"),
            ("hegmctl adopt 4711 --to gpu0", "let process 4711 go on, on gpu0"),
        ),
    ),
)
