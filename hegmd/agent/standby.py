"""A Python that was started before its turn: it imports PyTorch, and waits before any line of the script.

Its supervisor starts it while the process that is to leave trains still, by the same command and with one end of a pair
of sockets. Over that it is told what to import, says that it has, and gets its turn: what its environment lacks yet,
and the descriptors of the state. It may wait for long, and is then told once more what to import shortly before its
turn. Whatever else comes of it, such as the end of its supervisor, ends this process: it is never to be a second one of
a training that goes on.

Nothing of the script's may see a difference. All that was imported has to be what the script's own search path leads
to, and unchanged on disk; no GPU may have been opened; and PyTorch is out of sight until the script imports it: what
the agent does then, it does then. Its environment may still change in what nothing here has read (`unread`), and is
told to the supervisor that asks. Until its turn it is the first to go where memory runs short.
"""

from __future__ import annotations

import os
import sys

from . import unread
from .notes import note
from .sources import Sources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, NoReturn, Protocol

    class Hooks(Protocol):
        """The agent's at PyTorch's imports."""

        def hold(self) -> None:
            """Do nothing at an import before `let_go`."""
            ...

        def let_go(self) -> None:
            """Do now what was held."""
            ...


#: The end of the pair that this process has; set by who starts it before its turn.
READY_FD = "HEGM_READY_FD"
#: Set where the supervisor is to hear which variables may still be set or removed.
TELL_UNREAD = "HEGM_READY_TELL"
IMPORTS, PATH, READY, GO = b"imports", b"path", b"ready", b"go"
_TORCH = "torch"
_OWN = "_hegm"
# Those of the agent that come to life with PyTorch. Reading them starts nothing.
_ITS_OWN = ("lifecycle", "storage_transfer", "channel", "boundary", "state.session", "state.restore")
_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 4
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
# By which the supervisor tells it from a training that has come to its end. See client/hegmctl/supervisor.py.
_NOT_ITS_TURN = 97
#: What this process was given in its turn, and None for what it lost then: the script began with it, and the kernel
#: goes on telling what the process was started with.
by_turn: dict[bytes, bytes | None] = {}


def wait_for_turn(hooks: Hooks) -> None:
    """Return once it is this process's turn, and at once where it was not started before it. Else end the process."""
    line = os.environ.pop(READY_FD, None)  # before anything else: what is imported may start Pythons of its own
    tells = os.environ.pop(TELL_UNREAD, None) is not None
    if line is None:
        return
    try:
        _wait(hooks, int(line), tells=tells)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the script is not to begin
        _end(repr(error))


def _wait(hooks: Hooks, fd: int, *, tells: bool) -> None:
    os.set_inheritable(fd, False)
    signal: Any = __import__("signal")
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who is interrupted now has nothing to say about it
    waiting = _Waiting(hooks, tells=tells)
    socket: Any = __import__("socket")
    with socket.socket(fileno=fd) as supervisor, _Expendable():
        waiting.get_ready(supervisor, _told(_heard(supervisor), IMPORTS))
        while True:
            data, fds = _heard_with_descriptors(supervisor, socket)
            if data.split(b"\0")[0] != IMPORTS:
                break
            waiting.get_ready(supervisor, _told(data, IMPORTS))
        waiting.look()
        _take_turn(data, fds)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    note("its turn has come")


class _Waiting:
    """What it has imported by now, and where from."""

    def __init__(self, hooks: Hooks, *, tells: bool) -> None:
        self._hooks, self._tells = hooks, tells
        self._before = set(sys.modules)
        self._finders = set(sys.path_importer_cache)
        self._path: Sequence[str] = ()
        self._sources = Sources()
        self._hidden: OutOfSight | None = None

    def get_ready(self, supervisor: Any, wanted: Iterable[str]) -> None:
        """Import what is not there yet, see that all is as the script would have it, and say so."""
        self._path = _told(_heard(supervisor), PATH)
        if self._hidden is None:
            self._hooks.hold()
            _import(wanted)
        elif self._hidden.bring_back():
            _import(wanted)
        self._sources.note(sys.modules.values())
        self.look()
        _check_devices()
        names = unread.unread() if self._tells else []
        note(f"ready: {len(sys.modules) - len(self._before)} modules are imported before its turn")
        self._hidden = self._hidden or OutOfSight(self._hooks)
        self._hidden.hide()
        for name in set(sys.path_importer_cache) - self._finders - set(sys.path):
            del sys.path_importer_cache[name]
        supervisor.send(b"\0".join([READY, *(name.encode() for name in names)]))

    def look(self) -> None:
        """See that the script would import the same now, and that it is still the same. Raises RuntimeError."""
        self._sources.check()
        hidden = {} if self._hidden is None else self._hidden.modules
        known = {**sys.modules, **hidden}
        _check_path({name: known[name] for name in known.keys() - self._before}, self._path)


class _Expendable:
    """In the block it is the first process to be ended where memory runs short, before any that trains."""

    _PATH, _FIRST = "/proc/self/oom_score_adj", b"1000"

    def __enter__(self) -> None:
        try:
            with open(self._PATH, "r+b", buffering=0) as file:
                self._before: bytes | None = file.read()
                file.write(self._FIRST)
        except OSError as error:  # as where /proc may not be written to
            self._before = None
            note(f"it is not the first to go: {error}")

    def __exit__(self, *_exc: object) -> None:
        """Raises OSError: a training is not to stay so."""
        if self._before is not None:
            with open(self._PATH, "r+b", buffering=0) as file:
                file.write(self._before)


def _heard(supervisor: Any) -> bytes:
    data: bytes = supervisor.recv(_MAX_BYTES)
    return data


def _told(data: bytes, what: bytes) -> list[str]:
    """What the supervisor says in one message. Raises EOFError where it has gone."""
    words = data.split(b"\0")
    if words[0] != what:
        raise EOFError(f"no word of its {os.fsdecode(what)}")
    return [os.fsdecode(word) for word in words[1:]]


def _heard_with_descriptors(supervisor: Any, socket: Any) -> tuple[bytes, list[int]]:
    """The next message, and what came along. Raises OSError where that is not all of it."""
    int_bytes = 4
    data, ancillary, flags, _ = supervisor.recvmsg(
        _MAX_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * int_bytes), socket.MSG_CMSG_CLOEXEC
    )
    if flags & socket.MSG_CTRUNC:
        raise OSError("not all descriptors of its state have come: it may have no more (ulimit -n)")
    fds = [
        int.from_bytes(numbers[at : at + int_bytes], sys.byteorder)
        for _, _, numbers in ancillary
        for at in range(0, len(numbers) - len(numbers) % int_bytes, int_bytes)
    ]
    return data, fds


def _take_turn(data: bytes, fds: list[int]) -> None:
    """Have the rest of the environment: words without a value are of descriptors, in their order, which came along, and
    values without a name are variables that are not to be there. Raises EOFError where it is no turn."""
    words = data.split(b"\0")
    if words[0] != GO:
        raise EOFError("it was not given its turn")
    for word in words[1:]:
        name, has_value, value = word.partition(b"=")
        if not name:
            os.environb.pop(value, None)
            by_turn[value] = None
            continue
        if not has_value:
            number = fds.pop(0)
            os.set_inheritable(number, True)  # as they would have been inherited
            value = b"%d" % number
        os.environb.update({name: value})
        by_turn[name] = value


def _import(wanted: Iterable[str]) -> None:
    """Import them, in that order. One that fails is the script's to meet; what they warn of, too."""
    warnings: Any = __import__("warnings")
    show, warnings.showwarning = warnings.showwarning, _ignore
    gc: Any = __import__("gc")
    collects = gc.isenabled()
    gc.disable()  # modules are no garbage, and going through a million of their objects over and over takes a third
    try:
        for name in wanted:
            if name not in sys.modules and (name.partition(".")[0] in (_TORCH, "numpy")):
                try:
                    __import__(name)
                except Exception as error:  # noqa: BLE001 - of whatever kind
                    note(f"{name} is not imported before its turn: {error!r}")
        for name in _ITS_OWN:
            __import__(f"{__package__}.{name}")
    finally:
        warnings.showwarning = show
        gc.freeze()
        gc.unfreeze()  # which leaves all of them among the old ones, where they would be by now
        if collects:
            gc.enable()


def _ignore(*_args: object, **_named: object) -> None:
    """A warning."""


def _check_path(imported: Mapping[str, ModuleType], path: Sequence[str]) -> None:
    """See that the script would import the same by its own search path. Raises RuntimeError."""
    from _frozen_importlib_external import PathFinder

    for name, module in sorted(imported.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or name == _OWN or spec is None or not spec.has_location:
            continue
        found = PathFinder.find_spec(name, list(path))
        if found is not None and found.origin != spec.origin:
            raise RuntimeError(f"the script's {name} is {found.origin}, and {spec.origin} was imported")


def _check_devices() -> None:
    """See that no GPU knows of this process. Raises RuntimeError."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        raise RuntimeError("CUDA is in use")
    opened = [device for device in _opened() if device.startswith(_DEVICES)]
    if opened:
        raise RuntimeError(f"{opened[0]} is open")


def _opened() -> list[str]:
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass  # that of the listing itself
    return found


class OutOfSight:
    """PyTorch as it was imported, until the script imports it: then it is there at once, and the agent with it."""

    def __init__(self, hooks: Hooks) -> None:
        """Raises AttributeError where its loader is of a make that has no room for this."""
        self._hooks = hooks
        #: Those that are out of sight now.
        self.modules: dict[str, ModuleType] = {}
        torch = sys.modules.get(_TORCH)
        self._spec: Any = None if torch is None else torch.__spec__
        if self._spec is not None:
            loader: Any = self._spec.loader
            loader.create_module, loader.exec_module = self._give, self._show

    def hide(self) -> None:
        """Take it out of sight, if it was imported at all."""
        if self._spec is None:
            self._hooks.let_go()
            return
        for name in [name for name in sys.modules if name == _TORCH or name.startswith(_TORCH + ".")]:
            self.modules[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def bring_back(self) -> bool:
        """Have it in sight for a while, the agent's hooks held; False where there is none, and is to be none."""
        if self._spec is None:
            return False
        sys.meta_path.remove(self)
        sys.modules.update(self.modules)
        self.modules.clear()
        return True

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Its own, by which it is not loaded again but given; None for every other module."""
        found: ModuleSpec | None = self._spec if name == _TORCH else None
        return found

    def _give(self, _spec: ModuleSpec) -> ModuleType:
        return self.modules[_TORCH]

    def _show(self, _module: ModuleType) -> None:
        del self._spec.loader.create_module, self._spec.loader.exec_module
        sys.meta_path.remove(self)
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)
        self._hooks.let_go()


def _end(why: str) -> NoReturn:
    """Quietly: whoever has started it starts another one, also where this fails in its turn."""
    note(f"ended before its turn: {why}")
    os._exit(_NOT_ITS_TURN)
