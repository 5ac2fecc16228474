"""Commands about sharing GPUs: memory for an urgent job, leases, the queue, and priorities."""

from __future__ import annotations

from hegmctl.grammar.rows import AFTER_PROGRESS, LINES, ONE, Command, CommandForm
from hegmctl.grammar.words import GPUS, PID, PIDS, SECONDS, SIZE, Option, RequestField

PRIORITIES = ("production", "normal", "best-effort")
_PRIORITY = "production, normal, best-effort, or 0 to 100"
SLURM = Option(
    "--slurm",
    doc="stay as the command's parent, and suspend the job when Slurm sends SIGTSTP, before Slurm stops its processes; "
    "SIGCONT resumes it. The command ignores SIGTSTP unless it handles it",
)

SHARING = (
    Command(
        "make-room",
        "free memory of a GPU for something urgent, and keep it free",
        "Suspends jobs of lower priority, or migrates them if another GPU has room, fewest bytes first, and keeps the "
        "memory as a lease. The suspended jobs resume by themselves once the lease has ended: with the process, after "
        "the time, or with `hegmctl release`. Prints the id of the lease. With --wait it returns once the memory is "
        "free; if that is impossible, or takes longer than --timeout, it fails and there is no lease. Without "
        "--timeout it fails as soon as no running operation can free the memory. Interrupted, it drops the lease.",
        request="room.make",
        handler="sharing_commands:make_room",
        forms=(
            CommandForm(request="room.make", prints=ONE, render="sharing_text:room_text", call="make_room"),
            CommandForm("--wait", request="room.make", prints=AFTER_PROGRESS, render="sharing_text:room_text", call=""),
        ),
        options=(
            RequestField(
                "gpu", complete=GPUS, doc="the GPU; default: auto, the one where the fewest bytes have to leave"
            ),
            RequestField(
                "size_bytes", names=("--bytes",), kind=SIZE, metavar="SIZE", doc="how much to free, such as 60GiB"
            ),
            RequestField(
                "pid",
                names=("--for",),
                kind=PID,
                metavar="PID",
                complete=PIDS,
                doc="end the lease with this process; it and its children use the memory",
            ),
            RequestField(
                "hold_s",
                names=("--seconds",),
                kind=SECONDS,
                metavar="SECONDS",
                doc="end the lease this long after its memory is free",
            ),
            RequestField("name", metavar="NAME", doc="a name for `hegmctl release`, besides the id"),
            RequestField(
                "priority",
                metavar="PRIORITY",
                choices=PRIORITIES,
                doc=f"{_PRIORITY}; default: production, or the highest that you may use",
            ),
            RequestField("keep_context", doc="let jobs keep their CUDA contexts where that frees enough: faster"),
            RequestField("until_free", names=("--wait",), doc="wait until the memory is free"),
        ),
        examples=(
            ("hegmctl make-room --gpu gpu0 --bytes 60GiB --for $$ --wait", "free 60 GiB for this shell"),
            ("hegmctl make-room --bytes 20GiB --seconds 600 --dry-run", "which jobs would be suspended"),
        ),
    ),
    Command(
        "release",
        "end a lease",
        "The jobs that were suspended for it resume automatically.",
        request="room.release",
        forms=(CommandForm(request="room.release", render="sharing_text:released_text", call="release"),),
        arguments=(RequestField("lease", name="LEASE", doc="its id or its name"),),
        examples=(("hegmctl release l3", "end lease l3"),),
    ),
    Command(
        "queue",
        "show running and waiting jobs, what they wait for, and the leases",
        "One line for each job that has or wants a GPU, the highest priority first: what it does, since when, what it "
        "waits for and what happens next. Below them the leases.",
        request="queue",
        handler="sharing_commands:queue",
        forms=(
            CommandForm(request="queue", render="sharing_text:queue_text"),
            CommandForm("--watch", request="queue", prints=LINES, render="sharing_text:queue_text"),
        ),
        options=(
            Option(
                "-w",
                "--watch",
                kind=SECONDS,
                metavar="SECONDS",
                implied="2",
                doc="repeat every 2 seconds, or as given, until interrupted",
            ),
        ),
        examples=(("hegmctl queue --watch", "watch jobs take turns"),),
    ),
    Command(
        "priority",
        "change the priority of a job",
        "Jobs of higher priority get GPUs first, and jobs of lower priority are suspended for them. Jobs below "
        "production can be suspended. Users may give priorities up to a limit that the administrator sets.",
        request="job.priority",
        forms=(CommandForm(request="job.priority", render="sharing_text:priority_text", call="priority"),),
        arguments=(RequestField("job"), RequestField("priority", name="PRIORITY", doc=_PRIORITY)),
        examples=(("hegmctl priority train best-effort", "give other jobs precedence over `train`"),),
    ),
)
