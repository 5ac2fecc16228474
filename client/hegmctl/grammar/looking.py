"""Commands that look at the node and its daemon."""

from __future__ import annotations

from hegmctl.grammar.rows import LINES, Command, CommandForm
from hegmctl.grammar.words import FILES, GPUS, JOBS, PATH, PLACES, POSITIVE, SECONDS, SIZE, TEXT, Option, RequestField

FAULTS = ("lost", "error", "hang", "unknown-memory", "ecc", "xid", "xid79", "none")
EVENT_KINDS = ("config", "events", "gpu", "inventory", "job", "operation", "pool", "process", "sharing", "vendor")

_WATCH = Option(
    "-w",
    "--watch",
    kind=SECONDS,
    metavar="SECONDS",
    implied="2",
    doc="repeat every 2 seconds, or as given, until interrupted; waits while the daemon restarts",
)
_FILTER = Option(
    "--filter",
    kind=TEXT,
    metavar="KEY=VALUE",
    repeats=True,
    doc="only jobs with this value, such as state=training, gpu=1, user=ada or name=train*; of several with one key, "
    "any; with different keys, all",
)
_FORMAT = Option(
    "--format",
    kind=TEXT,
    metavar="FORMAT",
    doc="json; or a template such as '{{.ID}} {{.State}}', or 'table {{.ID}}\\t{{.Name}}', of ID, Name, State, GPU, "
    "VRAM, Steps, Age, Command, User, PID, Status, Operation and Priority",
)

LOOKING = (
    Command(
        "gpus",
        "show the GPUs of this node",
        "One line for each GPU: memory in use and in all, utilisation, temperature, power drawn and its limit, whether "
        "it is partitioned (MIG) or shared (MPS), and its health. A narrow terminal shows fewer columns.",
        request="gpus",
        handler="commands:gpus",
        options=(Option("-l", "--long", doc="show everything known about each GPU: identity, links, errors"),),
        examples=(
            ("hegmctl gpus", "the GPUs in a table"),
            ("hegmctl gpus --json | jq '.gpus[] | {id, memory_used_bytes}'", "the same for a program"),
        ),
    ),
    Command(
        "ps",
        "show the processes on the GPUs",
        "One line for each process that uses a GPU: its owner, its GPUs, its total GPU memory, whether hegmd's agent "
        "is connected in it, its job, and its command.",
        options=(
            RequestField(
                "gpus", names=("--gpu",), metavar="GPU", splits=True, complete=GPUS, doc="only processes on this GPU"
            ),
            RequestField("ways", doc="show which methods can move each process, and why the others cannot"),
            _WATCH,
        ),
        request="processes",
        handler="commands:ps",
        forms=(CommandForm(request="processes"), CommandForm("--watch", request="processes", prints=LINES)),
        arguments=(RequestField("pids", doc="only these processes, or those of these jobs"),),
        examples=(
            ("hegmctl ps --gpu gpu0 --watch", "watch one GPU"),
            ("hegmctl ps --ways 4711", "how process 4711 can be moved"),
        ),
    ),
    Command(
        "jobs",
        "show the jobs of this node",
        "One line for each job: what it does, its GPUs, its total GPU memory, its batches a second, how long it has "
        "run, and its script. A job is what one `hegmctl run` started, with all its processes; its id stays the same "
        "when it is suspended, restarted or restored. Every command takes the id, the name, or a pid of the job.",
        request="jobs",
        handler="job_commands:jobs",
        forms=(CommandForm(request="jobs"), CommandForm("--watch", request="jobs", prints=LINES)),
        options=(
            RequestField("all", names=("-a", "--all"), doc="also jobs that have ended, with their exit status"),
            _FILTER,
            _FORMAT,
            _WATCH,
        ),
        arguments=(RequestField("jobs", doc="only these jobs: id, name, or a pid"),),
        examples=(
            ("hegmctl jobs", "the jobs in a table"),
            ("hegmctl jobs --filter state=suspended --format '{{.ID}}'", "the ids of suspended jobs"),
            ("hegmctl jobs --all --format 'table {{.Name}}\\t{{.Status}}'", "the exit status of ended jobs"),
        ),
    ),
    Command(
        "inspect",
        "show everything known about a job",
        "Its state, its processes and what they do, what prevents a restart, and for a job that has ended when "
        "and how.",
        request="job",
        handler="job_commands:inspect",
        options=(_FORMAT,),
        examples=(("hegmctl inspect train", "the job `train`"),),
    ),
    Command(
        "wait",
        "wait until a job has ended",
        "Waits also while the daemon restarts; with --timeout at most that long after the job's last change of state.",
        exits="The exit status is the job's, or 128 and the number of the signal that ended it; 14 if it is not known.",
        request="job.wait",
        handler="job_commands:wait",
        examples=(("hegmctl wait train && hegmctl run python3 evaluate.py", "evaluate once it is trained"),),
    ),
    Command(
        "recovery",
        "show how jobs are protected, and recovered",
        "For each job of `hegmctl run --recover`: its snapshots with their step, age and size, what they cost, and "
        "each recovery with the time that its parts took. With --drop it deletes the state that is kept of a job that "
        "has ended.",
        request="recovery",
        handler="job_commands:recovery",
        forms=(
            CommandForm(request="recovery", render="recovery_text:recovery_text"),
            CommandForm("--drop", request="recovery.drop", render="recovery_text:dropped_text", call="drop_recovery"),
        ),
        options=(
            Option("--drop", kind=TEXT, metavar="JOB", complete=JOBS, doc="delete the state that is kept of this job"),
            Option("-y", "--yes", doc="do not ask for confirmation"),
        ),
        arguments=(RequestField("jobs", doc="only these jobs: id, name, or a pid"),),
        examples=(
            ("hegmctl recovery train", "the snapshots and recoveries of the job `train`"),
            ("hegmctl recovery --drop j7", "free the memory of a job that is not continued"),
        ),
    ),
    Command(
        "top",
        "watch GPUs, jobs and operations live",
        "GPUs with utilisation and memory over the last minutes, jobs with step rate and state or what they wait "
        "for, operations with bytes, and events. Keys suspend, resume and migrate the job under the cursor; each shows "
        "its plan first. `?` lists the keys. Needs the Python package textual, which hegmd's packages bring.",
        handler="top.start:top",
        options=(
            Option(
                "--interval",
                kind=SECONDS,
                metavar="SECONDS",
                doc="time between two reads of the node while nothing changes; default: 5",
            ),
        ),
        examples=(("hegmctl top", "watch this node"), ("ssh -t node1 hegmctl top --no-color", "watch another one")),
    ),
    Command(
        "events",
        "show what happened on this node",
        "Events that the daemon remembers, oldest first: GPUs lost and found, errors, processes that start and exit. "
        "With --follow it waits for more, also while the daemon restarts.",
        request="events",
        handler="commands:events",
        forms=(CommandForm(request="events", record="hegmd.protocol.snapshots:Event", prints=LINES, call=""),),
        options=(
            RequestField("since", metavar="NUMBER", doc="only events with this number or a higher one"),
            RequestField(
                "run",
                doc="the daemon's run that NUMBER belongs to, as shown by `hegmctl version`; in another run all "
                "events are shown",
            ),
            RequestField("follow", names=("-f", "--follow"), doc="wait for more events, until interrupted"),
            RequestField(
                "kinds",
                names=("--kind",),
                metavar="KIND",
                choices=EVENT_KINDS,
                doc="only this kind; `gpu` includes gpu.lost and every other kind of GPU event",
            ),
        ),
        examples=(("hegmctl events --kind gpu -f", "wait for events of GPUs"),),
    ),
    Command(
        "doctor",
        "check this node and show how to fix it",
        "Checks driver, libraries, CRIU, memory, kernel and permissions, with the daemon's rights, and prints the "
        "command that fixes each problem. Without a daemon it uses the caller's own rights. With --nccl it moves a "
        "throwaway job of two ranks on two free GPUs instead, which takes one to two minutes: its ranks exchange their "
        "GPUs, are suspended and resumed, and every loss is compared with an undisturbed run. The daemon keeps the "
        "verdict on this combination of driver, NCCL, PyTorch, chip and links, for all later plans.",
        exits="The exit status is 0 when nothing fails and 15 when something does; warnings do not count.",
        handler="commands:doctor",
        options=(
            Option("--nccl", doc="prove that ranks with NCCL communicators can be moved here"),
            Option(
                "--gpu",
                kind=TEXT,
                metavar="GPU,GPU",
                complete=PLACES,
                doc="with --nccl: the two GPUs; default: two free ones",
            ),
            Option(
                "--python",
                kind=PATH,
                metavar="PATH",
                complete=FILES,
                doc="with --nccl: the Python with the PyTorch to prove; default: python3 of VIRTUAL_ENV or PATH",
            ),
        ),
        forms=(
            CommandForm(record="hegmctl.answers:DoctorAnswer"),
            CommandForm("--nccl", record="hegmctl.answers:NcclAnswer"),
        ),
        examples=(("sudo hegmctl doctor --nccl --python .venv/bin/python", "before the first job with NCCL is moved"),),
    ),
    Command(
        "version",
        "show the versions of client and daemon",
        "Also shows the protocol and the daemon's capabilities. Without a daemon it shows the client's version and "
        "succeeds; use `hegmctl ping` for a check that fails.",
        handler="commands:version",
        forms=(CommandForm(record="hegmctl.answers:VersionAnswer"),),
    ),
    Command(
        "config",
        "show the active configuration, or reload it",
        "Shows every setting with its value and the source of the value.",
        request="config",
        forms=(
            CommandForm(request="config", render="answers_text:config_text"),
            CommandForm("--reload", request="reload", render="answers_text:reload_text"),
        ),
        options=(Option("--reload", doc="reload the daemon's configuration; an invalid one changes nothing"),),
    ),
    Command(
        "metrics",
        "print Prometheus metrics",
        "Text exposition format 0.0.4, of the node and of the daemon.",
        request="metrics",
        render="answers_text:metrics_text",
    ),
    Command(
        "ping",
        "check whether the daemon answers, and how fast",
        request="ping",
        handler="commands:ping",
        forms=(CommandForm(request="ping", record="hegmctl.answers:PingAnswer"),),
        options=(Option("-c", "--count", kind=POSITIVE, metavar="NUMBER", doc="number of requests; default: 1"),),
    ),
    Command(
        "simulate hold",
        "hold memory on a simulated GPU",
        "Holds simulated video memory for this process until it ends, or with a COMMAND becomes that command, which "
        "then holds it until it ends or closes all descriptors. For a daemon started with --simulate.",
        request="simulate.hold",
        handler="commands:simulate_hold",
        arguments=(
            RequestField("gpu", doc="the GPU, such as gpu0 or 0"),
            RequestField("vram_bytes", name="SIZE", kind=SIZE, doc="how much to hold, such as 512MiB or 2GiB"),
        ),
        tail="COMMAND",
        examples=(("hegmctl simulate hold gpu0 2GiB -- python3 train.py", "simulate a job that uses 2 GiB"),),
    ),
    Command(
        "simulate fault",
        "make a simulated GPU fail, or repair it",
        "For a daemon started with --simulate. Prints the active faults.",
        request="simulate.fault",
        render="answers_text:faults_text",
        arguments=(
            RequestField(
                "target", complete=GPUS, choices=("vendor",), doc="a GPU, or `vendor` for the vendor's whole library"
            ),
            RequestField("fault", choices=FAULTS, doc="one of " + ", ".join(FAULTS[:-1]) + "; or none, to repair it"),
        ),
        examples=(
            ("hegmctl simulate fault gpu0 ecc", "gpu0 has an uncorrectable memory error, and is failing"),
            ("hegmctl simulate fault gpu1 lost", "gpu1 falls off the bus"),
            ("hegmctl simulate fault gpu1 none", "gpu1 is back"),
        ),
    ),
)
