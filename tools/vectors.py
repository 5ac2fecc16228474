"""Writes docs/protocol-vectors: byte-exact examples that a client in any language can test itself against.

Run as `python tools/vectors.py DIR`. `frames.json` and `messages.json` need no daemon; `refused.json` and
`conversations.json` are to be played against `hegmd --simulate 2x8GiB`. docs/protocol-vectors/README.md says how, and a
test keeps the files fresh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hegmd.errors import NOT_FOUND, TIMEOUT
from hegmd.protocol import messages as m
from hegmd.protocol import operations as o
from hegmd.protocol import snapshots as s
from hegmd.protocol.codec import encode
from hegmd.protocol.frames import frame
from hegmd.protocol.record import Record

HELLO = {"v": 1, "id": 1, "op": "hello", "args": {"versions": [2], "name": "vectors"}}
GPU = s.Gpu(
    id="gpu0",
    index=0,
    uuid="GPU-5f0e8c1e-0000-4000-8000-000000000000",
    pci_address="0000:01:00.0",
    name="NVIDIA H200",
    vendor="nvidia",
    chip="10de:2335 9.0",
    memory_total_bytes=150_754_820_096,
    memory_used_bytes=34_359_738_368,
    memory_free_bytes=115_759_644_672,
    utilisation_percent=97.0,
    temperature_celsius=41.0,
    links=(s.PeerLink(to_uuid="GPU-peer", kind="nvlink", lanes=18, bytes_per_s=450_000_000_000),),
    health=s.Health(state="ok"),
)
PROCESS = s.GpuProcess(
    pid=4711,
    start_ticks=123_456,
    started_utc=1_790_000_000.5,
    uid=1000,
    user="ada",
    name="python",
    command="python train.py --name 'grün'",
    workload=s.Workload(kind="slurm", id="77", detail={"step": "0"}),
    gpus=(s.GpuUse(gpu="gpu0", vram_bytes=None),),
    ways=(s.Way(way="driver", possible=True, reason="driver 580.159.04"),),
)
VENDOR = s.Vendor(vendor="nvidia", state="ok", driver_version="580.159.04", age_s=0.125)
LOST = s.Event(seq=12, time_utc=1_790_000_001.0, kind="gpu.lost", severity="error", message="gpu1 is gone", gpu="gpu1")
CHECK = s.Check(id="nvidia.driver", status="ok", summary="driver 580.159.04")
OPERATION = o.Operation(
    id="7",
    kind="migrate",
    phase="rolled-back",
    processes=(o.OperationProcess(pid=4711, gpu="gpu0", to="gpu1", size_bytes=2**30, state="running"),),
    owner_uid=1000,
    created_utc=1_790_000_002.0,
    size_bytes=2**30,
    failure=o.Reason(
        code=TIMEOUT.name, message="no boundary within 60 s", hint="ask with a longer --timeout", pid=4711
    ),
)


def message_vectors() -> Iterator[dict[str, Any]]:
    """Return one message of each kind: every request, and the relevant replies, events and errors."""
    requests: list[m.Request] = [
        m.Hello(versions=(2,), name="vectors", program_version="1.0"),
        m.Ping(),
        m.Gpus(),
        m.Processes(pids=(4711,), gpus=("gpu0",)),
        m.Events(since=12, follow=True, kinds=("gpu",)),
        m.Cancel(request=5),
        m.Doctor(),
        m.ShowConfig(),
        m.Reload(),
        m.Metrics(),
        m.SimulateHold(gpu="gpu0", vram_bytes=2**33),
        m.SimulateFault(target="gpu1", fault="lost"),
        m.Migrate(pids=(4711,), to="gpu1", limit_s=60.0),
        m.Quiesce(pids=(4711,), hold_s=300.0, limit_s=30.0),
        m.Suspend(pids=(4711, 4712), dry_run=True),
        m.Resume(pid=4711),
        m.Checkpoint(pid=4711, path="/images/train", leave_running=True),
        m.Handoff(pid=4711, path="/images/train", limit_s=600.0),
        m.Restore(path="/images/train", to="gpu1"),
        m.Drain(gpu="gpu0", to=("gpu1",)),
        m.Swap(first=4711, second=4720),
        m.Operations(),
        m.Story(id=OPERATION.id, follow=True),
        m.CancelOperation(id=OPERATION.id),
        m.AgentAttend(
            token=32 * "0", python_version="3.11.2", framework="torch", gpu="gpu0", size_bytes=2**30, boundary=0
        ),
        m.AgentReport(order=1, result="done", boundary=262, parked=True),
    ]
    for number, request in enumerate(requests, start=1):
        version = m.HELLO_VERSION if isinstance(request, m.Hello) else m.PROTOCOL_VERSION
        yield _message(request.op, "caller", {"v": version, "id": number, "op": request.op, "args": request.to_plain()})
    answers: list[tuple[str, str, Record]] = [
        ("gpus reply", "ok", m.GpusReply(taken_utc=1_790_000_000.25, gpus=(GPU,), vendors=(VENDOR,))),
        ("processes reply", "ok", m.ProcessesReply(taken_utc=1_790_000_000.0, processes=(PROCESS,), vendors=())),
        ("an event in between", "event", LOST),
        ("a check in between", "event", CHECK),
        ("end of events", "ok", m.EventsReply(next_seq=13)),
        ("an operation comes on", "event", o.OperationProgress(id=OPERATION.id, phase="offloading", size_bytes=2**30)),
        ("an operation that was turned back", "ok", m.OperationReply(operation=OPERATION)),
        ("an order to an agent", "event", m.Order(order=1, do="park", at=262, limit_s=60.0)),
        ("an empty reply", "ok", m.Pong()),
    ]
    for number, (name, key, record) in enumerate(answers, start=1):
        yield _message(name, "daemon", {"id": number, key: record.to_plain()})
    error = m.ErrorInfo(code=NOT_FOUND.name, message="no process 1", hint="hegmctl ps lists them", facts={"pids": [1]})
    yield _message("an error", "daemon", {"id": 9, "err": error.to_plain()})
    yield _message("an error about the connection", "daemon", {"id": None, "err": error.to_plain()})
    yield _message("with descriptors", "caller", {"v": 2, "id": 2, "op": "ping", "args": {}, "fds": 2})
    yield _message("keys from the future", "daemon", {"id": 2, "ok": {"novel": [1, {"deep": None}]}, "novel": True})


def _message(name: str, who: str, envelope: dict[str, object]) -> dict[str, Any]:
    return {"name": name, "from": who, "envelope": envelope, "frame": frame(encode(envelope)).hex()}


def frame_vectors() -> list[dict[str, Any]]:
    """Streams of bytes, and the payloads in them."""
    one, two = b"\x80", b"\x81\xa1a\x01"
    return [
        _frames("one frame", frame(one), [one], breaks=False),
        _frames("two frames in one read", frame(one) + frame(two), [one, two], breaks=False),
        _frames("the beginning of a second one", frame(two) + frame(one)[:3], [two], breaks=False),
        _frames("an empty frame", bytes(4), [], breaks=True),
        _frames("longer than the limit", (4097).to_bytes(4, "big"), [], breaks=True),
        _frames("a good one and then an empty one", frame(one) + bytes(4), [one], breaks=True),
    ]


def _frames(name: str, stream: bytes, payloads: list[bytes], *, breaks: bool) -> dict[str, Any]:
    hexed = [payload.hex() for payload in payloads]
    return {"name": name, "limit_bytes": 4096, "stream": stream.hex(), "payloads": hexed, "breaks": breaks}


def refused_vectors() -> list[dict[str, Any]]:
    """Return messages that a caller must not send: the daemon answers with that code and, where it says so, closes."""
    hello = frame(encode(HELLO))

    def after(envelope: dict[str, object]) -> bytes:
        return hello + frame(encode(envelope))

    deep: object = None
    for _ in range(20):
        deep = [deep]
    return [
        _refused("an empty frame", bytes(4), "bad-request", closes=True),
        _refused("a frame over the limit before hello", (5000).to_bytes(4, "big"), "bad-request", closes=True),
        _refused("not msgpack", frame(b"\xc1"), "bad-request", closes=True),
        _refused("not a map", frame(b"\x93\x01\x02\x03"), "bad-request", closes=True),
        _refused("a key that is no string", frame(b"\x81\x01\x02"), "bad-request", closes=True),
        _refused("bytes after the map", frame(b"\x80\x80"), "bad-request", closes=True),
        _refused("an extension type", frame(b"\x81\xa1a\xc7\x01\x05\x00"), "bad-request", closes=True),
        _refused("text that is not UTF-8", frame(b"\x81\xa1a\xa1\xff"), "bad-request", closes=True),
        _refused("no hello", frame(encode({"v": 2, "id": 1, "op": "ping"})), "bad-request", closes=True),
        _refused("no id", frame(encode({"v": 1, "op": "hello"})), "bad-request", closes=True),
        _refused(
            "no version in common",
            frame(encode({"v": 1, "id": 1, "op": "hello", "args": {"versions": [99], "name": "x"}})),
            "incompatible",
            closes=True,
        ),
        _refused("nested too deeply", after({"v": 2, "id": 2, "op": "ping", "args": {"x": deep}}), "bad-request", True),
        _refused("an unknown operation", after({"v": 2, "id": 2, "op": "no.such"}), "incompatible", closes=False),
        _refused("another version", after({"v": 99, "id": 2, "op": "ping"}), "incompatible", closes=False),
        _refused(
            "arguments that do not fit",
            after({"v": 2, "id": 2, "op": "processes", "args": {"pids": [1.5]}}),
            "bad-request",
            closes=False,
        ),
        _refused("a second hello", after({**HELLO, "v": 2, "id": 2}), "bad-request", closes=False),
        _refused(
            "a GPU that is not there",
            after({"v": 2, "id": 2, "op": "processes", "args": {"gpus": ["gpu99"]}}),
            "not-found",
            closes=False,
        ),
    ]


def _refused(name: str, sent: bytes, code: str, closes: bool) -> dict[str, Any]:
    return {"name": name, "bytes": sent.hex(), "code": code, "closes": closes}


def conversation_vectors() -> list[dict[str, Any]]:
    """Whole conversations; an `expect` has to be contained in what comes (maps by key, lists item by item)."""
    return [*_answered(), *_streamed()]


def _answered() -> list[dict[str, Any]]:
    return [
        {
            "name": "hello tells who the caller is and what the daemon can do",
            "steps": [
                {"send": HELLO},
                {"expect": {"id": 1, "ok": {"version": 2, "simulated": True, "capabilities": ["simulate"]}}},
                {"send": {"v": 2, "id": 2, "op": "ping", "args": {}}},
                {"expect": {"id": 2, "ok": {}}},
            ],
        },
        {
            "name": "unknown keys are ignored",
            "steps": [
                {"send": {**HELLO, "novel": 1, "args": {"versions": [2, 7], "name": "x", "novel": [1]}}},
                {"expect": {"id": 1, "ok": {"version": 2}}},
            ],
        },
        {
            "name": "two GPUs of 8 GiB",
            "steps": [
                {"send": HELLO},
                {"expect": {"id": 1}},
                {"send": {"v": 2, "id": 2, "op": "gpus", "args": {}}},
                {"expect": {"id": 2, "ok": {"gpus": [{"id": "gpu0", "memory_total_bytes": 2**33}, {"id": "gpu1"}]}}},
            ],
        },
        {
            "name": "memory is held, seen and given back",
            "steps": [
                {"send": HELLO},
                {"expect": {"id": 1}},
                {"send": {"v": 2, "id": 2, "op": "simulate.hold", "args": {"gpu": "gpu1", "vram_bytes": 2**30}}},
                {"expect": {"id": 2, "ok": {"gpu": "gpu1", "vram_bytes": 2**30}}},
                {"send": {"v": 2, "id": 3, "op": "processes", "args": {"gpus": ["gpu1"]}}},
                {"expect": {"id": 3, "ok": {"processes": [{"gpus": [{"gpu": "gpu1", "vram_bytes": 2**30}]}]}}},
                {"send": {"v": 2, "id": 4, "op": "simulate.hold", "args": {"gpu": "gpu1", "vram_bytes": 2**40}}},
                {"expect": {"id": 4, "err": {"code": "refused"}}},
                {"send": {"v": 2, "id": 5, "op": "simulate.hold", "args": {"gpu": "gpu1", "vram_bytes": 0}}},
                {"expect": {"id": 5, "ok": {"vram_bytes": 0}}},
            ],
        },
    ]


def _streamed() -> list[dict[str, Any]]:
    return [
        {
            "name": "a kind of event that there is not",
            "steps": [
                {"send": HELLO},
                {"expect": {"id": 1}},
                {"send": {"v": 2, "id": 2, "op": "events", "args": {"kinds": ["gpu", "gup"]}}},
                {"expect": {"id": 2, "err": {"code": "bad-request", "facts": {"kind": "gup"}}}},
            ],
        },
        {
            "name": "events counted in another run of the daemon",
            "steps": [
                {"send": HELLO},
                {"expect": {"id": 1}},
                {"send": {"v": 2, "id": 2, "op": "events", "args": {"since": 1, "run": "another"}}},
                {"expect": {"id": 2, "event": {"kind": "events.missed", "facts": {"count": None}}}},
            ],
        },
        {
            "name": "a stream that is cancelled",
            "steps": [
                {"send": HELLO},
                {"expect": {"id": 1}},
                {"send": {"v": 2, "id": 2, "op": "events", "args": {"follow": True, "kinds": ["vendor.failed"]}}},
                {"send": {"v": 2, "id": 3, "op": "cancel", "args": {"request": 2}}},
                {"expect": {"id": 3, "ok": {"found": True}}},
                {"expect": {"id": 2, "err": {"code": "cancelled"}}},
            ],
        },
    ]


FILES = {
    "frames.json": frame_vectors,
    "messages.json": lambda: list(message_vectors()),
    "refused.json": refused_vectors,
    "conversations.json": conversation_vectors,
}


def main(directory: Path) -> None:
    """Write every file."""
    for name, make in FILES.items():
        (directory / name).write_text(json.dumps(make(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
