"""Answers as text: what is shown, what is shown as unknown, and that nothing from outside reaches the terminal raw."""

from __future__ import annotations

import pytest

from hegmctl import answers_text as say
from hegmctl.answers import DaemonVersion, DoctorAnswer, PingAnswer, VersionAnswer
from hegmctl.inventory_text import gpus_in_full, gpus_text, processes_text, ways_text, workload_text
from hegmctl.tables import Style, width
from hegmd.protocol import messages as m
from hegmd.protocol.record import Record
from hegmd.protocol.snapshots import AgentInfo, Check, Event, Gpu, GpuProcess, GpuUse, Vendor, Way, Workload
from tests.cells import in_one_test
from tests.unit.hegmctl import node

PIPE = Style()
ABSENT = Vendor(vendor="amd", state="absent", message="there is no amdgpu driver.", hint="")


def test_a_gpu_that_is_failing_is_called_so_with_the_reason() -> None:
    health = node.GPU0.health.replace(
        state="warn", notes=("it is hot", "XID 63"), condition="failing", causes=("rows",), reason="XID 63"
    )
    lines = gpus_text(node.GPUS.replace(gpus=(node.GPU0.replace(health=health),)), PIPE)
    assert "failing" in lines[1]
    assert lines[-2:] == ["gpu0: it is hot", "gpu0 is failing: XID 63"]


def test_gpus_in_a_table() -> None:
    assert gpus_text(node.GPUS, PIPE) == [
        "GPU   NAME                 MEMORY  UTIL  TEMP      POWER  MODE    HEALTH  PCI",
        "gpu0  NVIDIA H200  12.0/140.0 GiB   45%  41 C  312/700 W  normal  ok      0000:17:00.0",
        "gpu1  NVIDIA H200               -     -     -          -  -       lost    -",
        "",
        "gpu1: XID 79 was reported",
    ]
    bare = node.GPU1.replace(health=node.GPU1.health.replace(notes=()))
    lines = gpus_text(node.GPUS.replace(gpus=(bare,)), PIPE)
    assert lines[-1] == "gpu1: lost; it fell off the bus and the driver does not reach it"


@pytest.mark.parametrize("columns", [80, 120])
def test_gpus_fit_the_usual_terminals(columns: int) -> None:
    eight = [node.GPU0.replace(id=f"gpu{n}", name="NVIDIA H200 SXM5 141GB HBM3e") for n in range(8)]
    lines = gpus_text(node.GPUS.replace(gpus=tuple(eight)), Style(columns=columns, ellipsis="…"))
    assert all(width(line) <= columns for line in lines)
    assert all(word in lines[0] for word in ("GPU", "NAME", "MEMORY", "UTIL", "TEMP", "POWER", "HEALTH"))
    assert ("PCI" in lines[0]) == (columns == 120)


def test_unknown_is_never_shown_as_zero() -> None:
    bare = Gpu(id="gpu0", index=0, uuid="U", vendor="amd")
    row = gpus_text(node.GPUS.replace(gpus=(bare,), vendors=()), PIPE)[1]
    assert row.split() == ["gpu0", "-", "-", "-", "-", "-", "-", "unknown", "-"]
    assert "0" not in row.removeprefix("gpu0")
    idle = bare.replace(memory_used_bytes=0, utilisation_percent=0.0, mig=True, mps=True)
    row = gpus_text(node.GPUS.replace(gpus=(idle,), vendors=()), PIPE)[1]
    assert row.split() == ["gpu0", "-", "0.0/-", "GiB", "0%", "-", "-", "MIG+MPS", "unknown", "-"]
    full = gpus_in_full(node.GPUS.replace(gpus=(bare,), vendors=()), PIPE)
    assert "  memory errors   - corrected, - uncorrected, - pages or rows retired" in full
    assert "  links           -" in full


@pytest.mark.parametrize(
    ("vendor", "remark"),
    [
        (
            Vendor(vendor="nvidia", state="stale", message="NVML does not answer.", hint="see dmesg", age_s=75.0),
            "nvidia (1 min 15 s old): NVML does not answer; see dmesg",
        ),
        (Vendor(vendor="nvidia", state="stale"), "nvidia (never read): stale"),
        (
            Vendor(vendor="nvidia", state="failed", message="driver and library differ", hint="reboot"),
            "nvidia: driver and library differ; reboot",
        ),
        (Vendor(vendor="simulated", state="ok"), "These GPUs are simulated."),
    ],
)
def test_notes_about_health_are_printed_below_the_table(vendor: Vendor, remark: str) -> None:
    for lines in (
        gpus_text(node.GPUS.replace(vendors=(vendor, ABSENT)), PIPE),
        gpus_in_full(node.GPUS.replace(vendors=(vendor, ABSENT)), PIPE),
        processes_text(node.PROCESSES.replace(vendors=(vendor, ABSENT)), PIPE),
    ):
        assert lines[-1] == remark
    quiet = gpus_text(node.GPUS.replace(vendors=(vendor,)), Style(remarks=False))
    assert len(quiet) == 1 + len(node.GPUS.gpus)


def test_no_gpus_are_a_sentence_and_the_reasons() -> None:
    assert gpus_text(node.GPUS.replace(gpus=(), vendors=(ABSENT,)), PIPE) == [
        "There are no GPUs on this node.",
        "amd: there is no amdgpu driver",
    ]
    assert processes_text(node.PROCESSES.replace(processes=(), vendors=()), PIPE) == ["No process is on a GPU here."]
    assert ways_text(node.PROCESSES.replace(processes=(), vendors=()), PIPE) == ["No process is on a GPU here."]


def test_all_of_a_gpu_in_a_block() -> None:
    lines = gpus_in_full(node.GPUS, PIPE)
    assert lines[0] == "gpu0  NVIDIA H200"
    assert "  links           gpu1 by nvlink x18, 450 GB/s" in lines
    assert "  NUMA node       0" in lines
    assert "  memory free     127.0 GiB" in lines
    assert "  last XID        79" in lines
    often = node.GPU1.replace(health=node.GPU1.health.replace(xid_count=3))
    assert "  last XID        79, the last of 3" in gpus_in_full(node.GPUS.replace(gpus=(often,)), PIPE)
    assert "" in lines[:-3], "an empty line stands between two GPUs"


def test_processes_in_a_table() -> None:
    assert processes_text(node.PROCESSES, PIPE) == [
        " PID  USER   GPU         VRAM  AGENT  WORKLOAD    COMMAND",
        "  99  -      gpu0           -  no     -           -",
        "4711  alice  gpu0-1  12.0 GiB  yes    slurm:1234  python3 train.py --epochs 10",
        "",
        "99: it runs in another pid namespace",
    ]
    of_a_job = [process.replace(job="j7" if process.pid == 4711 else None) for process in node.PROCESSES.processes]
    head, *rows = processes_text(node.PROCESSES.replace(processes=tuple(of_a_job)), PIPE)
    assert [line.split()[1] for line in (head, *rows[:2])] == ["JOB", "-", "j7"]


def _on(*names: str) -> GpuProcess:
    uses = tuple(GpuUse(gpu=name, vram_bytes=None) for name in names)
    return node.TRAINING.replace(gpus=uses)


@in_one_test(
    ("names", "shown"),
    [
        (("gpu0",), "gpu0"),
        (("gpu0", "gpu1", "gpu2", "gpu3"), "gpu0-3"),
        (("gpu7", "gpu0", "gpu1", "gpu3"), "gpu0-1,3,7"),
        (("gpu0", "gpu0"), "gpu0"),
        (("gpu0", "card1"), "gpu0,card1"),
        ((), "-"),
    ],
)
def test_runs_of_gpus_are_drawn_together(names: tuple[str, ...], shown: str) -> None:
    row = processes_text(node.PROCESSES.replace(processes=(_on(*names),)), PIPE)[1]
    assert row.split()[2] == shown


def test_a_share_that_is_not_known_makes_the_sum_a_lower_bound() -> None:
    uses = (GpuUse(gpu="gpu0", vram_bytes=node.GIB), GpuUse(gpu="gpu1", vram_bytes=None))
    row = processes_text(node.PROCESSES.replace(processes=(node.TRAINING.replace(gpus=uses),)), PIPE)[1]
    assert ">1.0 GiB" in row


def test_held_bytes_get_a_column_when_there_are_any() -> None:
    assert "HELD" not in processes_text(node.PROCESSES, PIPE)[0]
    held = node.TRAINING.replace(held_bytes=3 * node.GIB, uid=7, user=None, command=None)
    header, row, *_ = processes_text(node.PROCESSES.replace(processes=(held,)), PIPE)
    assert "HELD" in header
    assert row.split() == ["4711", "7", "gpu0-1", "12.0", "GiB", "3.0", "GiB", "yes", "slurm:1234", "[python3]"]


@pytest.mark.parametrize(
    ("workload", "shown"),
    [
        (Workload(kind="container", id="f" * 64), "container:ffffffffffff"),
        (Workload(kind="kubernetes", id="0b7e2f60-7a3c"), "kubernetes:0b7e2f60-7a3c"),
        (Workload(kind="systemd", id="jupyter.service"), "systemd:jupyter.service"),
    ],
)  # fmt: skip
def test_a_workload_has_a_short_name(workload: Workload, shown: str) -> None:
    assert workload_text(workload) == shown


def test_options_with_their_reasons() -> None:
    assert ways_text(node.PROCESSES.replace(processes=(node.TRAINING,)), PIPE) == [
        "4711  alice  gpu0 8.0 GiB, gpu1 4.0 GiB  python3 train.py --epochs 10",
        "  driver   yes  driver 580.159.04 can checkpoint it",
        "  criu     no   no criu program was found",
    ]
    long = node.TRAINING.replace(ways=(Way(way="driver", possible=False, reason="word " * 30),))
    lines = ways_text(node.PROCESSES.replace(processes=(long,)), Style(columns=60))
    assert all(width(line) <= 60 for line in lines)
    assert lines[2].startswith(" " * 16 + "word")


def test_an_event_in_a_line() -> None:
    line = say.event_text(node.EVENTS[1], PIPE)[0]
    assert line.split()[0] == "2"
    assert line.endswith("  error    gpu.lost          gpu1 is lost")
    assert "\x1b[31m" in say.event_text(node.EVENTS[1], Style(colour=True))[0]


def test_a_check_in_a_line_and_its_mending_below() -> None:
    assert say.check_text(node.CHECKS[0], PIPE) == ["ok    nvidia.driver             driver 580.159.04"]
    assert say.check_text(node.CHECKS[1], PIPE) == [
        "warn  nvidia.persistence        persistence mode is off",
        "                                fix: nvidia-smi -pm 1",
    ]


@pytest.mark.parametrize(
    ("counts", "summary"),
    [((12, 2, 1, 0), "12 ok, 2 warnings, 1 failure"), ((1, 1, 0, 3), "1 ok, 1 warning, 0 failures, 3 skipped")],
)
def test_the_doctors_last_line(counts: tuple[int, int, int, int], summary: str) -> None:
    ok, warn, fail, skip = counts
    assert say.doctor_summary(DoctorAnswer(checks=(), ok=ok, warn=warn, fail=fail, skip=skip), PIPE)[-1] == summary


def test_versions() -> None:
    daemon = DaemonVersion(
        version="0.1.0",
        protocol=1,
        node="node7",
        simulated=True,
        capabilities=("simulate",),
        limits=node.WELCOME.limits,
        you=node.WELCOME.you,
    )
    answer = VersionAnswer(version="0.2.0", protocols=(1,), socket="/run/hegm/hegmd.sock", daemon=daemon, error=None)
    assert say.version_text(answer, PIPE) == [
        "hegmctl  0.2.0, protocol 1",
        "hegmd    0.1.0, protocol 1",
        "node     node7, its GPUs are simulated",
        "socket   /run/hegm/hegmd.sock",
        "you      uid 1000, may act on your own processes",
        "offers   simulate",
    ]
    error = m.ErrorInfo(code="no-daemon", message="no hegmd runs here", hint="start it")
    assert say.version_text(answer.replace(daemon=None, error=error), PIPE) == [
        "hegmctl  0.2.0, protocol 1",
        "hegmd    -",
        "",
        "no hegmd runs here; start it",
    ]


def test_answers_to_ping() -> None:
    answer = PingAnswer(version="0.1.0", node="node7", socket="/s", round_trips_s=(0.00021,))
    assert say.ping_text(answer, PIPE) == ["hegmd 0.1.0 on node7 answers in 0.21 ms"]
    answer = answer.replace(round_trips_s=(0.003, 0.001, 2.0))
    assert say.ping_text(answer, PIPE) == ["hegmd 0.1.0 on node7: 3 answers, min 1.00 ms, median 3.00 ms, max 2.0 s"]


def test_settings_in_a_table() -> None:
    assert say.config_text(node.CONFIG, PIPE) == [
        "SETTING        VALUE                 SOURCE",
        "daemon.socket  /run/hegm/hegmd.sock  default",
        "metrics.port   0                     file",
        'audit.file     ""                    default',
        "",
        "The file is /etc/hegm/hegmd.toml.",
    ]
    assert say.config_text(node.CONFIG.replace(path=None), PIPE)[-1] == "There is no file; these are the defaults."


def test_reload_faults_holds_and_metrics() -> None:
    assert say.reload_text(m.ReloadReply(changed=("log.level",), after_restart=("metrics.port",)), PIPE) == [
        "changed: log.level",
        "changes when the daemon restarts: metrics.port",
    ]
    assert say.reload_text(m.ReloadReply(changed=(), after_restart=()), PIPE) == [
        "The configuration was read again; nothing in it has changed."
    ]
    assert say.faults_text(m.FaultReply(faults={"gpu1": "lost"}), PIPE) == ["gpu1: lost"]
    assert say.faults_text(m.FaultReply(faults={}), PIPE) == ["There are no faults."]
    assert say.hold_text(m.HoldReply(gpu="gpu0", vram_bytes=node.GIB), PIPE) == [
        "holding 1.0 GiB on gpu0 until interrupted"
    ]
    assert say.metrics_text(m.MetricsReply(text="a 1\nb 2\n"), PIPE) == ["a 1", "b 2"]


BAD = "\x1b]0;owned\x07\x9b2J\u202e"


def _poisoned(record: Record) -> Record:
    """The record with every text in it, at any depth, ending in what a terminal would obey."""

    def poison(value: object) -> object:
        if isinstance(value, Record):
            return _poisoned(value)
        if isinstance(value, str):
            return value + BAD
        if isinstance(value, tuple):
            return tuple(poison(item) for item in value)
        if isinstance(value, dict):
            return {f"{key}{BAD}": poison(item) for key, item in value.items()}
        return value

    return record.replace(**{name: poison(value) for name, value in vars(record).items()})


@in_one_test(
    ("view", "record"),
    [
        (gpus_text, node.GPUS),
        (gpus_in_full, node.GPUS),
        (gpus_text, node.GPUS.replace(gpus=())),
        (processes_text, node.PROCESSES),
        (ways_text, node.PROCESSES),
        (say.event_text, node.EVENTS[0]),
        (say.check_text, Check(id="a", status="fail", summary="b", fix="c")),
        (say.config_text, node.CONFIG),
        (say.faults_text, m.FaultReply(faults={"gpu1": "lost"})),
        (say.hold_text, m.HoldReply(gpu="gpu0", vram_bytes=1)),
        (say.reload_text, m.ReloadReply(changed=("a",), after_restart=("b",))),
        (say.ping_text, PingAnswer(version="1", node="n", socket="/s", round_trips_s=(0.1,))),
        (
            say.version_text,
            VersionAnswer(
                version="1",
                protocols=(1,),
                socket="/s",
                daemon=DaemonVersion(
                    version="1",
                    protocol=1,
                    node="n",
                    simulated=False,
                    capabilities=("c",),
                    limits=node.WELCOME.limits,
                    you=node.WELCOME.you,
                ),
                error=None,
            ),
        ),
    ],
)
@in_one_test("style", [Style(), Style(columns=80, ellipsis="…")])
def test_no_text_from_outside_reaches_a_terminal_raw(view: object, record: Record, style: Style) -> None:
    """A process chooses its own name, and can put in it what makes a terminal do things."""
    assert callable(view)
    for line in view(_poisoned(record), style):
        assert line.isprintable(), ascii(line)


def test_an_event_of_an_unknown_severity_is_shown_like_others() -> None:
    event = Event(seq=1, time_utc=0.0, kind="new.kind", severity="dire", message="hm")
    assert "dire" in say.event_text(event, Style(colour=True))[0]


def test_missed_images_are_listed_below_the_table() -> None:
    agent = AgentInfo(name="hegm-agent", version="1", image_missed="no image at 12:00:00: the disk is full")
    lines = processes_text(node.PROCESSES.replace(processes=(node.TRAINING.replace(agent=agent),)), PIPE)
    assert lines[-1] == "4711: no image at 12:00:00: the disk is full"
