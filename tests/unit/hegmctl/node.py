"""A node for the tests of the client: the replies of its daemon."""

from __future__ import annotations

from hegmd import __version__
from hegmd.protocol import messages as m
from hegmd.protocol.snapshots import (
    AgentInfo,
    Check,
    Event,
    Gpu,
    GpuProcess,
    GpuUse,
    Health,
    PeerLink,
    Vendor,
    Way,
    Workload,
)
from tests.unit.hegmctl.fake_daemon import Answerer, Caller, IncomingRequest, cancelling, remembering, saying

GIB = 1024**3

WELCOME = m.Welcome(
    version=2,
    daemon_version=__version__,
    node="node7",
    simulated=False,
    capabilities=(),
    limits=m.Limits(frame_bytes=262_144, requests_in_flight=32),
    you=m.Caller(uid=1000, gid=1000, pid=4711, may_act_on_all=False),
)
SIMULATED = WELCOME.replace(simulated=True, capabilities=("simulate",))

GPU0 = Gpu(
    id="gpu0",
    index=0,
    uuid="GPU-0000",
    pci_address="0000:17:00.0",
    name="NVIDIA H200",
    vendor="nvidia",
    chip="2335:9.0",
    memory_total_bytes=140 * GIB,
    memory_used_bytes=12 * GIB,
    memory_free_bytes=127 * GIB,
    utilisation_percent=45.0,
    temperature_celsius=41.0,
    power_watts=312.4,
    power_limit_watts=700.0,
    numa_node=0,
    links=(PeerLink(to_uuid="GPU-0001", kind="nvlink", lanes=18, bytes_per_s=450_000_000_000),),
    mig=False,
    mps=False,
    persistence=True,
    driver_version="580.159.04",
    health=Health(state="ok", ecc_corrected=0, ecc_uncorrected=0, retired_pages=0),
)
GPU1 = Gpu(
    id="gpu1",
    index=1,
    uuid="GPU-0001",
    vendor="nvidia",
    name="NVIDIA H200",
    state="lost",
    health=Health(state="unknown", notes=("XID 79 was reported",), last_xid=79),
)
NVIDIA = Vendor(vendor="nvidia", state="ok", driver_version="580.159.04", age_s=0.1)
GPUS = m.GpusReply(taken_utc=1_795_257_600.0, gpus=(GPU0, GPU1), vendors=(NVIDIA,))

TRAINING = GpuProcess(
    pid=4711,
    start_ticks=123_456,
    started_utc=1_795_250_000.0,
    uid=1000,
    user="alice",
    name="python3",
    command="python3 train.py --epochs 10",
    workload=Workload(kind="slurm", id="1234", detail={"step": "0"}),
    gpus=(GpuUse(gpu="gpu0", vram_bytes=8 * GIB), GpuUse(gpu="gpu1", vram_bytes=4 * GIB)),
    agent=AgentInfo(name="hegm-agent", version="0.1.0"),
    ways=(
        Way(way="driver", possible=True, reason="driver 580.159.04 can checkpoint it"),
        Way(way="criu", possible=False, reason="no criu program was found"),
    ),
)
ELSEWHERE = GpuProcess(pid=99, gpus=(GpuUse(gpu="gpu0", vram_bytes=None),), note="it runs in another pid namespace")
PROCESSES = m.ProcessesReply(taken_utc=1_795_257_600.0, processes=(ELSEWHERE, TRAINING), vendors=(NVIDIA,))

EVENTS = (
    Event(seq=1, time_utc=1_795_257_000.0, kind="inventory.ready", severity="info", message="2 GPUs were found"),
    Event(seq=2, time_utc=1_795_257_100.0, kind="gpu.lost", severity="error", message="gpu1 is lost", gpu="gpu1"),
)

CHECKS = (
    Check(id="nvidia.driver", status="ok", summary="driver 580.159.04"),
    Check(id="nvidia.persistence", status="warn", summary="persistence mode is off", fix="nvidia-smi -pm 1"),
    Check(id="amd.driver", status="skip", summary="there is no AMD GPU here"),
)

CONFIG = m.ConfigReply(
    path="/etc/hegm/hegmd.toml",
    settings=(
        m.Setting(key="daemon.socket", value="/run/hegm/hegmd.sock", source="default", doc="where it listens"),
        m.Setting(key="metrics.port", value=0, source="file", doc="a port"),
        m.Setting(key="audit.file", value="", source="default", doc="a file"),
    ),
)


def answers(welcome: m.Welcome = WELCOME) -> dict[type[m.Request], Answerer]:
    """Return the answers of a healthy daemon, with those of the test in place of some."""

    def check_all(caller: Caller, request: IncomingRequest) -> m.DoctorReply:
        for check in CHECKS:
            caller.event(request.id, check)
        return m.DoctorReply(checks=CHECKS)

    return {
        m.Hello: saying(welcome),
        m.Ping: saying(m.Pong()),
        m.Cancel: cancelling,
        m.Gpus: saying(GPUS),
        m.Processes: saying(PROCESSES),
        m.Jobs: saying(m.JobsReply(taken_utc=0.0, jobs=())),
        m.Events: remembering(EVENTS),
        m.Doctor: check_all,
        m.ShowConfig: saying(CONFIG),
        m.Reload: saying(m.ReloadReply(changed=("log.level",), after_restart=("metrics.port",))),
        m.Metrics: saying(m.MetricsReply(text='hegmd_build_info{version="0.1.0"} 1\n')),
        m.SimulateHold: saying(m.HoldReply(gpu="gpu0", vram_bytes=GIB)),
        m.SimulateFault: saying(m.FaultReply(faults={"gpu1": "lost"})),
    }
