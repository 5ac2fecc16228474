"""A Python that has imported PyTorch, and what else it is told to, and forks for each training script.

With `--no-torch` it has imported only what it is told to, and forks for a program such as `python -m hegmd`. Else it
reads a JSON object a line: the script, its environment and folder, where its output goes, the boundary at which it
leaves its state and where, and whether all that it computes is recorded. Answers each with the exit status. With an
agent, the agent is mounted in the child as the injected `sitecustomize` would have, and meets what is imported already;
everything of it that follows is as in any worker.

With `ranks` it forks that many from a launcher, which is to them what torchrun is. With `supervises` the module is
`hegmctl`, and what that starts with this Python is forked from it (forking.py).

With `--socket FD` it reads from that socket, where the descriptors of a script come along, answers at once with its pid
and later with its status, and has many at a time (forked.py). With `--shared LOCK` that socket is a listening one, and
several processes use it.
"""

# ruff: noqa: T201, BLE001 - a program of its own, which says how scripts ended whatever they raised
import argparse
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REFUSED_STATUS = 97
# The limit for a script that hangs; on a busy machine a script may take minutes.
MAX_S = 300
# Files below a script on its stack that are not part of it.
OURS = {__file__}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int)
    parser.add_argument("--shared", metavar="LOCK")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    if options.shared and os.fork():
        os._exit(0)  # the child serves all workers, and ends when the last one disconnects
    get_ready(options.modules, has_torch=not options.no_torch)
    if options.socket is not None:
        with socket.socket(fileno=options.socket) as asking:
            serve(asking, options.shared)
        return
    for request in sys.stdin:
        wanted = json.loads(request)
        child = os.fork()
        if child == 0:
            run(wanted)
        _pid, status = os.waitpid(child, 0)
        print(wanted["number"], os.waitstatus_to_exitcode(status), flush=True)


def get_ready(names: Sequence[str], *, has_torch: bool = True) -> None:
    """Import these, and have what there is then cost the forked scripts nothing."""
    gc.disable()
    if has_torch:
        import_torch()
    for name in names:
        import_module(name)
    # The agent asks the collector for all objects, which writes a count into each: every forked script copied a hundred
    # megabytes. Frozen objects, which existed before the fork, are left out.
    gc.collect()
    gc.freeze()
    gc.enable()
    for made in vars(weakref.finalize)["_registry"]:
        made.atexit = False  # PyTorch's libraries need not be taken apart at each script's end


def serve(asking: socket.socket, lock: str | None) -> None:
    """Fork for each request and report each exit until the requester closes its end; then end all children.

    With a lock the socket is one that requesters connect to, while they hold the lock, and the last of them ends this.
    """
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    requesters = {} if lock else {asking.fileno(): asking}
    poll = select.poll()
    poll.register(asking, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number in running:
                pid, requester = running.pop(number)
                poll.unregister(number)
                os.close(number)
                _pid, status = os.waitpid(pid, 0)
                answer(requester, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})
                continue
            if number not in requesters:
                if number == asking.fileno():
                    accepted = asking.accept()[0]
                    requesters[accepted.fileno()] = accepted
                    poll.register(accepted, select.POLLIN)
                continue
            requester = requesters[number]
            data, fds = received(requester)
            if not data:
                poll.unregister(number)
                del requesters[number]
                for pidfd in [pidfd for pidfd, (_pid, its) in running.items() if its is requester]:
                    poll.unregister(pidfd)
                    os.close(pidfd)
                    pid, _requester = running.pop(pidfd)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                requester.close()
                if not requesters and (lock is None or is_last(asking, lock)):
                    return
                continue
            pid = os.fork()
            if pid == 0:
                become(json.loads(data), fds)
            answer(requester, {"begun": pid})
            for given in fds:
                os.close(given)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, requester
            poll.register(pidfd, select.POLLIN)


def received(requester: socket.socket) -> tuple[bytes, list[int]]:
    """A request with its descriptors; nothing if the requester has gone."""
    try:
        data, fds, _flags, _address = socket.recv_fds(requester, 1 << 20, 3)
    except ConnectionResetError:
        return b"", []
    return data, fds


def is_last(listening: socket.socket, lock: str) -> bool:
    """Close the listening socket if no worker is about to connect. Return whether it is closed."""
    with open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if select.select([listening], [], [], 0)[0]:
            return False
        listening.close()
    return True


def answer(asking: socket.socket, what: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the requester has gone, which the next read shows
        asking.send(json.dumps(what).encode())


def become(wanted: dict, fds: list[int]) -> None:
    """In the child: take these descriptors and nothing else, and become the script. Does not come back."""
    if wanted["session"]:
        os.setsid()
    for target, source in enumerate(fds):  # all of them are above these three
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    run(wanted)


def import_torch() -> None:
    """PyTorch, NumPy, which scripts import too, and what PyTorch only imports when it is used."""
    import_module("numpy")
    import torch.utils.data

    import_module("recorded")  # which is beside this file
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.manual_seed(0)


def run(wanted: dict) -> None:
    """In the child: become the script. Does not come back."""
    if "output" in wanted:
        open_streams(wanted)
    # Its own, and not those of this Python: the agent could not find those to flush their output.
    sys.stdout = os.fdopen(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors, buffering=1, closefd=False)
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    recorder, status = None, 1
    try:
        if "module" in wanted:
            run_module(wanted)
        if "ranks" in wanted:
            launch(wanted["ranks"], wanted["argv"])
        signal.alarm(wanted.get("limit_s", MAX_S))
        recorder = begin_record(wanted["record"])
        script = types.ModuleType("__main__")
        script.__file__ = wanted["argv"][0]
        sys.modules["__main__"] = script
        if wanted["agent"]:
            mount(wanted, recorder)
        sys.argv = wanted["argv"]
        sys.path.insert(0, str(Path(script.__file__).parent))
        exec(compile(Path(script.__file__).read_text(), script.__file__, "exec"), vars(script))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        if recorder is not None and status == 0:
            recorder.finish()
        end(status)


def run_module(wanted: dict) -> None:
    """As `python -m` does. It may not come back."""
    for path in wanted["libraries"]:
        ctypes.CDLL(path)
    if wanted.get("supervises"):
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        import_module("forking").spawn_by_forking(run, OURS)
    sys.path[0] = wanted["folder"]
    sys.argv = wanted["argv"]
    runpy.run_module(wanted["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


def launch(ranks: int, argv: Sequence[str]) -> None:
    """Fork ranks, and come back in each of them. Here is their store, and all of them end once one has failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    living: set[int] = set()
    has_failed = False

    def end_all(_number: int = 0, _frame: object = None) -> None:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            for other in living:
                os.kill(other, signal.SIGTERM)

    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            of_all = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), **of_all, **where})
            if "forking" in sys.modules:
                sys.modules["forking"].show([sys.executable, *argv], os.environ)
            return
        living.add(pid)
    of_it = {"is_master": True, "wait_for_workers": False}
    has_libuv = os.environ.get("USE_LIBUV") != "0"  # as torchrun's: the server with it has io_uring
    _store = sys.modules["torch.distributed"].TCPStore("127.0.0.1", port, use_libuv=has_libuv, **of_it)
    signal.signal(signal.SIGTERM, end_all)
    while living:
        pid, status = os.wait()
        living.discard(pid)
        if status:
            end_all()
    os._exit(int(has_failed))


def open_streams(wanted: dict) -> None:
    """Have its output and errors in these files, and nothing to read."""
    output = os.open(wanted["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    errors = os.open(wanted["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
        os.close(source)


def end(status: int) -> None:
    """As at the end of any Python: what is registered for it runs, and what is written is out."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: waits for the threads of the script
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def begin_record(path: str | None) -> Any:
    """Return the recorder of all computed values into that file, if there is a file."""
    return None if path is None else import_module("recorded").Recorder(opened(path))


def opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def mount(wanted: dict, recorder: Any) -> None:
    """The agent, as in a worker; it leaves its state at that boundary."""
    inject = ROOT / "hegmd" / "agent" / "inject" / "sitecustomize.py"
    sys.path.insert(0, str(inject.parent))
    names = ("torch.optim.optimizer", "torch.utils.data.dataloader", "torch.nn.parallel.distributed")
    modules = [sys.modules[name] for name in names]
    exec(compile(inject.read_text(), str(inject), "exec"), {"__file__": str(inject), "__name__": "sitecustomize"})
    mounting, life = import_module("_hegm.agent.import_hooks"), import_module("_hegm.agent.lifecycle")
    places = import_module("_hegm.agent.state.code.position")
    places.FILES_LOOKED_THROUGH.update((*OURS, import_module("recorded").__file__))
    acts = (mounting._on_optimizer_import, mounting._on_loader_import, mounting._on_data_parallel_import)
    hooked = list(zip(acts, modules, strict=True))
    finder = next(one for one in sys.meta_path if isinstance(one, mounting.FrameworkFinder))
    is_hidden = finder._held is not None  # it was prestarted
    if is_hidden or wanted.get("hides_torch"):
        if not is_hidden:
            finder.hold()
            import_module("_hegm.agent.standby").HiddenTorch(finder).hide()
        finder._held += hooked  # which act once the script imports PyTorch
        return
    for act, module in hooked:
        act(module)
    if wanted["at"] is None:
        return
    quiesce, readiness = import_module("_hegm.agent.quiesce"), import_module("_hegm.agent.state.script.capture_points")
    changed = threading.Event()
    gate = life.gate()
    gate.on_change = changed.set
    into = wanted["into"]
    fits = readiness.fits_of(gate)
    if recorder is not None:
        kinds = opened(wanted["kinds"])
        position = lambda: readiness.asked_iterator(sys._getframe(2))  # noqa: E731 - by whom it is called is what counts
        fits = import_module("recorded").at_kind(recorder, kinds, position, fits, wanted["kind"])
    gate.ask(quiesce.ParkRequest(quiesce.PARK, at=wanted["at"], fits=fits))
    if into is not None:
        threading.Thread(target=leave, args=(gate, changed, into), daemon=True).start()


def leave(gate: Any, changed: threading.Event, into: str) -> None:
    """In a thread beside the training, as the agent's own is: once it is parked, save its state and leave."""
    errors, leaving = import_module("_hegm.errors"), import_module("_hegm.agent.state.save_and_exit")
    while not gate.parked:
        changed.wait()
        changed.clear()
    fd = os.open(into, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        leaving.save(fd)
    except errors.HegmError as error:
        print(f"refused: {error.message}", file=sys.stderr)
        end(REFUSED_STATUS)
    except BaseException:
        traceback.print_exc()
        end(1)
    leaving.leave()


if __name__ == "__main__":
    main()
