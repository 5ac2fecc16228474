"""The command line of hegmctl as one table: commands, their options and arguments, and what each means.

Everything that speaks of the command line is made from here: the parser (`arguments`), `--help` (`help`), the manual
page and the completions of three shells (`pages`). To add a command: add it here and its function in `commands`.

It is not argparse because argparse costs 9 ms to import, as much as a whole Python start, and every call would pay it;
and because argparse can be asked neither for its grammar nor for a good word to somebody who mistyped. Holds data only.

Longer than 400 lines because it is one table, which is read from top to bottom.
"""

from __future__ import annotations

# What a value is, and so how it is checked.
FLAG = "flag"
TEXT = "text"
PATH = "a path"
COUNT = "a whole number"
POSITIVE = "a whole number over 0"
SECONDS = "a number of seconds"
SIZE = "a size such as 2GiB"
PID = "a process id"

# What the shell can offer for a value; `gpus`, `pids` and `event-kinds` are asked of the daemon.
FILES = "files"
GPUS = "gpus"
PIDS = "pids"
COMMANDS = "commands"


class Option:
    """One option. `implied` is the value of one that may be given without any; such a value needs the `=`."""

    __slots__ = ("choices", "complete", "doc", "implied", "key", "kind", "metavar", "names", "repeats")

    def __init__(
        self,
        *names: str,
        doc: str,
        kind: str = FLAG,
        metavar: str = "",
        repeats: bool = False,
        implied: str | None = None,
        complete: str = "",
        choices: tuple[str, ...] = (),
    ) -> None:
        self.names = names
        self.key = names[-1].lstrip("-")
        self.doc = doc
        self.kind = kind
        self.metavar = metavar
        self.repeats = repeats
        self.implied = implied
        self.complete = complete
        self.choices = choices


class Argument:
    """One argument in its place, or with `many` any number of them at the end.

    `choices` are all that it can be; beside `complete`, they are what it can be besides.
    """

    __slots__ = ("choices", "complete", "doc", "kind", "many", "name")

    def __init__(
        self,
        name: str,
        *,
        doc: str,
        kind: str = TEXT,
        many: bool = False,
        complete: str = "",
        choices: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.doc = doc
        self.kind = kind
        self.many = many
        self.complete = complete
        self.choices = choices


class Verb:
    """One command. `tail` names what may follow a `--` and is handed on as it is."""

    __slots__ = ("arguments", "doc", "examples", "hidden", "name", "options", "summary", "tail")

    def __init__(
        self,
        name: str,
        summary: str,
        doc: str = "",
        *,
        options: tuple[Option, ...] = (),
        arguments: tuple[Argument, ...] = (),
        tail: str = "",
        examples: tuple[tuple[str, str], ...] = (),
        hidden: bool = False,
    ) -> None:
        self.name = name
        self.summary = summary
        self.doc = doc
        self.options = options
        self.arguments = arguments
        self.tail = tail
        self.examples = examples
        self.hidden = hidden


PROGRAM = "hegmctl"
SUMMARY = "ask hegmd, the daemon of this node's GPUs"
DESCRIPTION = (
    "hegmctl shows the GPUs of this node and the processes on them, checks the node, and speaks to the node's daemon, "
    "hegmd, over a Unix socket. On a terminal it prints aligned tables in colour; into a pipe, plain text; with "
    "--json, JSON. What it does not know it shows as `-`, never as 0."
)

GLOBAL_OPTIONS: tuple[Option, ...] = (
    Option("--socket", kind=PATH, metavar="PATH", complete=FILES, doc="the daemon's socket"),
    Option("--json", doc="print JSON, as docs/json.md describes it; errors too, to standard error"),
    Option("-q", "--quiet", doc="print the answer and nothing about it"),
    Option("--color", doc="use colours, even in a pipe"),
    Option("--no-color", doc="use no colours; so do NO_COLOR in the environment and TERM=dumb"),
    Option(
        "--timeout",
        kind=SECONDS,
        metavar="SECONDS",
        doc="wait so long: for an answer (10, doctor 120), or a batch (60)",
    ),
    Option("-h", "--help", doc="explain the program or the command"),
    Option("--version", doc="print the version of hegmctl; `hegmctl version` asks the daemon for its own as well"),
)

GROUPS: dict[str, str] = {
    "images": "look at images of jobs on disk",
    "simulate": "make simulated GPUs hold memory or fail",
}

FAULTS = ("lost", "error", "hang", "unknown-memory", "ecc", "xid", "none")
EVENT_KINDS = ("config", "events", "gpu", "inventory", "operation", "pool", "process", "vendor")

_DRY_RUN = Option("-n", "--dry-run", doc="only show what would be done, or every reason why it cannot be")
_NO_WAIT = Option("--no-wait", doc="do not wait for the end; `hegmctl op` shows it")
_WAIT = Option("--wait", doc="wait for the end, which is what is done anyway")
_CARRIER = Option(
    "--carrier",
    kind=TEXT,
    metavar="CARRIER",
    choices=("peer", "host", "worker", "driver"),
    doc="how the bytes go: peer (GPU to GPU), host (the pool, by hegmd), worker (the pool, by the job) or driver; "
    "else the fastest that can. One that cannot is refused, with the reason",
)
_JOBS = Argument("PID", many=True, kind=PID, complete=PIDS, doc="the processes; the others of their jobs come along")

_VERBS = (
    Verb(
        "gpus",
        "show the GPUs of this node",
        "One line for each GPU: memory in use and in all, utilisation, temperature, power drawn and its limit, whether "
        "it is cut up (MIG) or shared (MPS), and its health. A narrow terminal shows fewer columns.",
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
            Option("--gpu", kind=TEXT, metavar="GPU", repeats=True, complete=GPUS, doc="only processes on this GPU"),
            Option("--ways", doc="show in which ways each process could be moved, and why not in the others"),
            Option(
                "-w",
                "--watch",
                kind=SECONDS,
                metavar="SECONDS",
                implied="2",
                doc="show it again every 2 seconds, or as given, until interrupted; waits for a daemon that restarts",
            ),
        ),
        arguments=(Argument("PID", many=True, kind=PID, complete=PIDS, doc="only these processes"),),
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
        options=(
            Option("--since", kind=COUNT, metavar="NUMBER", doc="only events with this number or a higher one"),
            Option(
                "--run",
                kind=TEXT,
                metavar="RUN",
                doc="the daemon's run that NUMBER is of, as `hegmctl version` shows it; in another run all is shown",
            ),
            Option("-f", "--follow", doc="stay and wait for more, until interrupted"),
            Option(
                "--kind",
                kind=TEXT,
                metavar="KIND",
                repeats=True,
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
        "command that mends what is wrong. Without a daemon it makes the checks with the caller's own rights. The exit "
        "status is 0 when nothing fails and 15 when something does; warnings do not count.",
    ),
    Verb(
        "version",
        "show the versions of client and daemon",
        "Also the protocol that they speak and what the daemon can do. Without a daemon it says so and is content with "
        "the client's version; `hegmctl ping` is the command that fails then.",
    ),
    Verb(
        "config",
        "show the configuration in force, or read it again",
        "Every setting with its value and where the value comes from.",
        options=(
            Option("--reload", doc="make the daemon read its configuration again; a bad one is refused as a whole"),
        ),
    ),
    Verb("metrics", "print Prometheus metrics", "Text exposition format 0.0.4, of the node and of the daemon."),
    Verb(
        "ping",
        "see whether the daemon answers, and how fast",
        options=(Option("-c", "--count", kind=POSITIVE, metavar="NUMBER", doc="ask this often; once if not given"),),
    ),
    Verb(
        "simulate hold",
        "hold memory on a simulated GPU",
        "Holds simulated video memory for this process until it ends, or with a COMMAND becomes that command, which "
        "then holds it until it ends or closes all descriptors. For a daemon started with --simulate.",
        arguments=(
            Argument("GPU", complete=GPUS, doc="the GPU, such as gpu0"),
            Argument("SIZE", kind=SIZE, doc="how much to hold, such as 512MiB or 2GiB"),
        ),
        tail="COMMAND",
        examples=(("hegmctl simulate hold gpu0 2GiB -- python3 train.py", "a job that seems to use 2 GiB"),),
    ),
    Verb(
        "simulate fault",
        "make a simulated GPU fail, or mend it",
        "For a daemon started with --simulate. The faults in force afterwards are printed.",
        arguments=(
            Argument(
                "TARGET", complete=GPUS, choices=("vendor",), doc="a GPU, or `vendor` for the vendor's whole library"
            ),
            Argument("FAULT", choices=FAULTS, doc="one of " + ", ".join(FAULTS[:-1]) + "; or none, to mend it"),
        ),
        examples=(
            ("hegmctl simulate fault gpu1 lost", "gpu1 falls off the bus"),
            ("hegmctl simulate fault gpu1 none", "gpu1 is back"),
        ),
    ),
    Verb(
        "run",
        "run a command so that it can be moved",
        "Becomes the command, with hegmd's agent in every Python that it starts. Nothing is installed and no line of "
        "the script changes; exit status, signals, terminal and process group are the command's own. One that is "
        "not found ends with 127, and one that cannot be run with 126, as in a shell. Without a daemon one is started "
        "for this user's own processes, which ends when its last job has. With --allow-restart it stays as the "
        "command's parent: signals and exit status are passed on, and killed, it leaves the command running.",
        options=(
            Option("--gpu", kind=TEXT, metavar="GPU", complete=GPUS, doc="the GPU to be on, on a simulated node"),
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
        options=(
            Option(
                "--to", kind=TEXT, metavar="GPU", complete=GPUS, doc="the GPU to go to; GPU,GPU or OLD=NEW for several"
            ),
            Option(
                "--via",
                kind=TEXT,
                metavar="WAY",
                choices=("restart",),
                doc="leave, and be started again from its state",
            ),
            Option("--allow-restart", doc="let it be a restart where there is no better way"),
            Option(
                "--env", kind=TEXT, metavar="NAME=VALUE", repeats=True, doc="restart with it so; NAME alone: without it"
            ),
            Option("--python", kind=PATH, metavar="PATH", complete=FILES, doc="restart with this Python"),
            _CARRIER,
            _DRY_RUN,
            _WAIT,
            _NO_WAIT,
        ),
        arguments=(_JOBS,),
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
        ),
    ),
    Verb(
        "suspend",
        "take running jobs off their GPUs",
        "Stops the job between two batches and holds its bytes in the pool until `resume`; meanwhile its memory is "
        "free for others. With --spill the bytes go on to disk and take no memory either; that can be asked of a job "
        "that is suspended already. Where the disk has no room, they stay in memory, and the command fails.",
        options=(
            Option("--spill", doc="have the bytes on disk, with checksums, until `resume`"),
            _CARRIER,
            _DRY_RUN,
            _WAIT,
            _NO_WAIT,
        ),
        arguments=(_JOBS,),
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
        options=(
            Option(
                "--hold",
                kind=SECONDS,
                metavar="SECONDS",
                doc="let it go on by itself after so long; 60 if not given",
            ),
            _DRY_RUN,
            _WAIT,
            Option("--no-wait", doc="do not wait until it stands; `hegmctl op` shows it"),
        ),
        arguments=(_JOBS,),
        examples=(
            ("hegmctl quiesce 4711 --timeout 30 --hold 300", "at a boundary within 30 s, for 5 minutes at most"),
        ),
    ),
    Verb(
        "offload",
        "take running jobs off their GPUs: `suspend`, as one step of several",
        "The step between `quiesce` and `handoff`, or a `suspend` by itself: they are the same. --timeout is how long "
        "the wait for a boundary may take, of a job that does not stand at one already.",
        options=(
            Option("--spill", doc="have the bytes on disk, with checksums, until `resume`"),
            _CARRIER,
            _DRY_RUN,
            _WAIT,
            _NO_WAIT,
        ),
        arguments=(_JOBS,),
    ),
    Verb(
        "handoff",
        "write a suspended job into an image on disk",
        "The second half of `checkpoint`: of a job that is off its GPU already. Its processes end when the image was "
        "read back; if that cannot be, or takes longer than --timeout, the job stays suspended and no image is left.",
        options=(_DRY_RUN, _WAIT, _NO_WAIT),
        arguments=(
            Argument("PID", kind=PID, complete=PIDS, doc="a process of the job"),
            Argument("DIR", complete=FILES, doc="the directory that the image is to have; it must not be there yet"),
        ),
        examples=(("hegmctl handoff 4711 /images/train --timeout 600", "within ten minutes, or not at all"),),
    ),
    Verb(
        "resume",
        "let a suspended job go on, or one that only stands",
        "Done means that its next batch was seen. If its bytes are not back after --timeout, it is suspended again.",
        options=(
            Option("--to", kind=TEXT, metavar="GPU", complete=GPUS, doc="the GPU to go on at; else where it was"),
            _DRY_RUN,
            _WAIT,
            _NO_WAIT,
        ),
        arguments=(Argument("PID", kind=PID, doc="a process of the job"),),
        examples=(("hegmctl resume 4711 --to gpu1", "let it go on, on gpu1"),),
    ),
    Verb(
        "checkpoint",
        "write a running job into an image on disk",
        "Stops the job between two batches, writes its processes and the bytes that it had on GPUs into DIR, reads all "
        "of it back, and then ends the job. The image is written with the caller's own rights and is the caller's; it "
        "holds all memory of the job. Whatever fails, the job goes on where it was. `restore` brings it back, also "
        "after a reboot, or on another node with the same chip and the same files.",
        options=(
            Option("--leave-running", doc="let the job go on after it, instead of ending it"),
            _CARRIER,
            _DRY_RUN,
            _WAIT,
            _NO_WAIT,
        ),
        arguments=(
            Argument("PID", kind=PID, complete=PIDS, doc="a process of the job"),
            Argument("DIR", complete=FILES, doc="the directory that the image is to have; it must not be there yet"),
        ),
        examples=(
            ("hegmctl checkpoint 4711 /images/train", "have job 4711 on disk, and its GPU free"),
            ("hegmctl checkpoint --leave-running 4711 /images/train", "and let it go on"),
        ),
    ),
    Verb(
        "restore",
        "bring a job back from an image",
        "Reads the image, has CRIU make the processes again, under the numbers that they had, and puts their bytes "
        "back; done means that the next batch was seen. What fails before the processes are there leaves nothing but "
        "the image; after that it leaves a suspended job, which `resume` brings back. So does --timeout. What the job "
        "said into a pipe or on a terminal leads nowhere after it, unless --stdout or --stderr name a file.",
        options=(
            Option("--to", kind=TEXT, metavar="GPU", complete=GPUS, doc="the GPU to go on at; else where it was"),
            Option(
                "--truncate-outputs",
                doc="cut files that have grown since back to where the job was, with the caller's rights",
            ),
            Option(
                "--stdout", kind=TEXT, metavar="FILE", complete=FILES, doc="append its output there; `-` is to ours"
            ),
            Option("--stderr", kind=TEXT, metavar="FILE", complete=FILES, doc="the same for its standard error"),
            _DRY_RUN,
            _NO_WAIT,
        ),
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
        examples=(
            ("hegmctl restore /images/train --to gpu1", "let it go on, on gpu1"),
            ("hegmctl restore /images/train --stdout train.log", "and have what it says in train.log"),
        ),
    ),
    Verb(
        "drain",
        "move everything off a GPU",
        "One job after the other, each to a GPU that takes it, with a summary at the end. Only processes on that GPU "
        "move; the others of their jobs stand by. The exit status is that of the first job that was not moved.",
        options=(
            Option("--to", kind=TEXT, metavar="GPU", repeats=True, complete=GPUS, doc="only to this GPU; else to any"),
            _DRY_RUN,
            _WAIT,
            Option("--no-wait", doc="begin all moves at once and wait for no end; `hegmctl ops` shows them"),
        ),
        arguments=(Argument("GPU", complete=GPUS, doc="the GPU to be emptied"),),
        examples=(("hegmctl drain gpu0 --to gpu1,gpu2", "empty gpu0 before its maintenance"),),
    ),
    Verb(
        "swap",
        "let two jobs change places",
        "Where there is not room for one beside the other, the first waits in the pool while the second moves. Once "
        "begun it is carried out to its end, also when hegmctl is interrupted.",
        options=(
            _DRY_RUN,
            _WAIT,
            Option("--no-wait", doc="do not wait for the end; the steps after the first follow by themselves"),
        ),
        arguments=(
            Argument("PID", kind=PID, complete=PIDS, doc="a process of the one job"),
            Argument("OTHER", kind=PID, complete=PIDS, doc="a process of the other"),
        ),
        examples=(("hegmctl swap 4711 4712", "each goes where the other is"),),
    ),
    Verb(
        "ops",
        "show the operations, and what needs a person",
        "Those under way, the suspended, and the last ones that are over; below them what was found on the node and "
        "belongs to none, each with the command that does something about it.",
    ),
    Verb(
        "op",
        "show one operation and its story",
        options=(
            Option("-f", "--follow", doc="wait until it has come to rest, and show how it comes on"),
            Option("--story", doc="tell the story in full: times by the clock, causes, what was found and then done"),
        ),
        arguments=(Argument("ID", doc="the operation"),),
    ),
    Verb(
        "cancel",
        "have an operation turned back",
        "The job is brought back to how it was. Refused where going on is shorter than going back.",
        arguments=(Argument("ID", doc="the operation"),),
    ),
    Verb(
        "adopt",
        "bring back what no operation has",
        "Without a PID, lists what was found on the node and belongs to no operation: processes that stand, or that "
        "the CUDA driver has locked or checkpointed, and bytes in memory or on disk. With a PID, makes an operation "
        "of that process and the others of its job and lets them go on. Nothing of it is ever deleted unless --drop "
        "says so.",
        options=(
            Option("--to", kind=TEXT, metavar="GPU", complete=GPUS, doc="the GPU to go on at; else the job's own"),
            Option("--drop", kind=TEXT, metavar="NAME", doc="give up these bytes for good"),
            Option("-y", "--yes", doc="do not ask before that"),
            _DRY_RUN,
            _WAIT,
            _NO_WAIT,
        ),
        arguments=(Argument("PID", many=True, kind=PID, doc="a process of the job"),),
        examples=(
            ("hegmctl adopt", "what there is"),
            ("hegmctl adopt 4711 --to gpu0", "let process 4711 go on, on gpu0"),
        ),
    ),
    Verb(
        "images ls",
        "show images of jobs, and what is left of some",
        "Takes no daemon: it is done with the caller's own rights. Exit status 15 says that one is broken, or left "
        "over from a writer that was killed.",
        arguments=(Argument("DIR", many=True, complete=FILES, doc="an image, or a directory with some; else `.`"),),
    ),
    Verb(
        "images show",
        "show what an image is of",
        "Reads the manifest and sees that every file is there. With --json, all of it.",
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
    ),
    Verb(
        "images verify",
        "read all of an image and compare it with its checksums",
        "Reads from the disk, past the page cache where the file system lets it.",
        arguments=(Argument("DIR", complete=FILES, doc="the image"),),
    ),
    Verb(
        "images rm",
        "remove images, or what is left of some",
        "Only images are removed, and only what is an image's in them; not one that is being written or restored.",
        options=(Option("-y", "--yes", doc="do not ask before that"),),
        arguments=(Argument("DIR", many=True, complete=FILES, doc="the images"),),
        examples=(("hegmctl images rm --yes .job.hegm-new-1a2b3c4d", "what a killed writer left of `job`"),),
    ),
    Verb(
        "help",
        "explain a command",
        arguments=(Argument("COMMAND", many=True, complete=COMMANDS, doc="the command"),),
    ),
    Verb(
        "__complete",
        "what shell completions ask for: one candidate a line, and silence when there is no daemon",
        arguments=(Argument("WHAT", choices=(GPUS, PIDS), doc="what to list"),),
        hidden=True,
    ),
)

VERBS: dict[str, Verb] = {verb.name: verb for verb in _VERBS}
