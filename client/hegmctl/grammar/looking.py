"""Commands that look at the node and its daemon."""

from __future__ import annotations

from hegmctl.grammar.rows import LINES, Form, Verb
from hegmctl.grammar.words import GPUS, POSITIVE, SECONDS, SIZE, Of, Option

FAULTS = ("lost", "error", "hang", "unknown-memory", "ecc", "xid", "none")
EVENT_KINDS = ("config", "events", "gpu", "inventory", "operation", "pool", "process", "vendor")

LOOKING = (
    Verb(
        "gpus",
        "show the GPUs of this node",
        "One line for each GPU: memory in use and in all, utilisation, temperature, power drawn and its limit, whether "
        "it is cut up (MIG) or shared (MPS), and its health. A narrow terminal shows fewer columns.",
        request="gpus",
        handler="commands:gpus",
        options=(Option("-l", "--long", doc="show all that is known of each GPU: identity, links, errors"),),
        examples=(
            ("hegmctl gpus", "the GPUs in a table"),
            ("hegmctl gpus --json | jq '.gpus[] | {id, memory_used_bytes}'", "the same for a program"),
        ),
    ),
    Verb(
        "ps",
        "show the processes on the GPUs",
        "One line for each process with a hand on a GPU: its owner, its GPUs, its video memory on all of them "
        "together, whether an agent of hegmd is connected in it, what it belongs to, and its command.",
        options=(
            Of("gpus", names=("--gpu",), metavar="GPU", splits=True, complete=GPUS, doc="only processes on this GPU"),
            Of("ways", doc="show in which ways each process could be moved, and why not in the others"),
            Option(
                "-w",
                "--watch",
                kind=SECONDS,
                metavar="SECONDS",
                implied="2",
                doc="show it again every 2 seconds, or as given, until interrupted; waits for a daemon that restarts",
            ),
        ),
        request="processes",
        handler="commands:ps",
        forms=(Form(request="processes"), Form("--watch", request="processes", prints=LINES)),
        arguments=(Of("pids", doc="only these processes"),),
        examples=(
            ("hegmctl ps --gpu gpu0 --watch", "look at what happens on one GPU"),
            ("hegmctl ps --ways 4711", "how process 4711 could be moved"),
        ),
    ),
    Verb(
        "events",
        "show what happened on this node",
        "Events that the daemon remembers, oldest first: GPUs lost and found, errors, processes coming and going. With "
        "--follow it stays and waits for more, also across a restart of the daemon.",
        request="events",
        handler="commands:events",
        forms=(Form(request="events", record="hegmd.protocol.snapshots:Event", prints=LINES, call=""),),
        options=(
            Of("since", metavar="NUMBER", doc="only events with this number or a higher one"),
            Of(
                "run",
                doc="the daemon's run that NUMBER is of, as `hegmctl version` shows it; in another run all is shown",
            ),
            Of("follow", names=("-f", "--follow"), doc="stay and wait for more, until interrupted"),
            Of(
                "kinds",
                names=("--kind",),
                metavar="KIND",
                choices=EVENT_KINDS,
                doc="only this kind; `gpu` stands for gpu.lost and all of its family",
            ),
        ),
        examples=(("hegmctl events --kind gpu -f", "wait for something to happen to a GPU"),),
    ),
    Verb(
        "doctor",
        "check this node and say how to mend it",
        "Checks driver, libraries, CRIU, memory, kernel and permissions, with the daemon's rights, and prints the "
        "command that mends what is wrong. Without a daemon it makes the checks with the caller's own rights.",
        exits="The exit status is 0 when nothing fails and 15 when something does; warnings do not count.",
        handler="commands:doctor",
        forms=(Form(record="hegmctl.answers:DoctorAnswer"),),
    ),
    Verb(
        "version",
        "show the versions of client and daemon",
        "Also the protocol that they speak and what the daemon can do. Without a daemon it says so and is content with "
        "the client's version; `hegmctl ping` is the command that fails then.",
        handler="commands:version",
        forms=(Form(record="hegmctl.answers:VersionAnswer"),),
    ),
    Verb(
        "config",
        "show the configuration in force, or read it again",
        "Every setting with its value and where the value comes from.",
        request="config",
        forms=(
            Form(request="config", render="answers_text:config_text"),
            Form("--reload", request="reload", render="answers_text:reload_text"),
        ),
        options=(
            Option("--reload", doc="make the daemon read its configuration again; a bad one is refused as a whole"),
        ),
    ),
    Verb(
        "metrics",
        "print Prometheus metrics",
        "Text exposition format 0.0.4, of the node and of the daemon.",
        request="metrics",
        render="answers_text:metrics_text",
    ),
    Verb(
        "ping",
        "see whether the daemon answers, and how fast",
        request="ping",
        handler="commands:ping",
        forms=(Form(request="ping", record="hegmctl.answers:PingAnswer"),),
        options=(Option("-c", "--count", kind=POSITIVE, metavar="NUMBER", doc="ask this often; once if not given"),),
    ),
    Verb(
        "simulate hold",
        "hold memory on a simulated GPU",
        "Holds simulated video memory for this process until it ends, or with a COMMAND becomes that command, which "
        "then holds it until it ends or closes all descriptors. For a daemon started with --simulate.",
        request="simulate.hold",
        handler="commands:simulate_hold",
        arguments=(
            Of("gpu", doc="the GPU, such as gpu0"),
            Of("vram_bytes", name="SIZE", kind=SIZE, doc="how much to hold, such as 512MiB or 2GiB"),
        ),
        tail="COMMAND",
        examples=(("hegmctl simulate hold gpu0 2GiB -- python3 train.py", "a job that seems to use 2 GiB"),),
    ),
    Verb(
        "simulate fault",
        "make a simulated GPU fail, or mend it",
        "For a daemon started with --simulate. The faults in force afterwards are printed.",
        request="simulate.fault",
        render="answers_text:faults_text",
        arguments=(
            Of("target", complete=GPUS, choices=("vendor",), doc="a GPU, or `vendor` for the vendor's whole library"),
            Of("fault", choices=FAULTS, doc="one of " + ", ".join(FAULTS[:-1]) + "; or none, to mend it"),
        ),
        examples=(
            ("hegmctl simulate fault gpu1 lost", "gpu1 falls off the bus"),
            ("hegmctl simulate fault gpu1 none", "gpu1 is back"),
        ),
    ),
)
