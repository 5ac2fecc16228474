"""A Python that was started before its turn: it imports PyTorch, and waits before any line of the script.

Its supervisor starts it while the process that is to leave trains still, by the same command and with one end of a pair
of sockets. Over that it is told what to import, says that it has, and gets its turn: what its environment lacks yet,
and the descriptors of the state. Whatever else comes of it, such as the end of its supervisor, ends this process: it is
never to be a second one of a training that goes on.

Nothing of the script's may see a difference. All that was imported has to be what the script's own search path leads
to, no GPU may have been opened, and PyTorch is out of sight until the script imports it: what the agent does then, it
does then.
"""

from __future__ import annotations

import os
import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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
IMPORTS, PATH, READY, GO = b"imports", b"path", b"ready", b"go"
_TORCH = "torch"
_OWN = "_hegm"
# Those of the agent that come to life with PyTorch. Reading them starts nothing.
_ITS_OWN = ("life", "carrying", "channel", "boundary", "restart.beginning", "restart.capture")
_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 4
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
# By which the supervisor tells it from a training that has come to its end. See client/hegmctl/supervising.py.
_NOT_ITS_TURN = 97


def wait_for_turn(hooks: Hooks) -> None:
    """Return once it is this process's turn, and at once where it was not started before it. Else end the process."""
    line = os.environ.pop(READY_FD, None)  # before anything else: what is imported may start Pythons of its own
    if line is None:
        return
    try:
        _wait(hooks, int(line))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the script is not to begin
        _end(repr(error))


def _wait(hooks: Hooks, fd: int) -> None:
    os.set_inheritable(fd, False)
    before = set(sys.modules)
    finders = set(sys.path_importer_cache)
    signal: Any = __import__("signal")
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who is interrupted now has nothing to say about it
    socket: Any = __import__("socket")
    with socket.socket(fileno=fd) as supervisor:
        wanted, path = _told(supervisor, IMPORTS), _told(supervisor, PATH)
        hooks.hold()
        _import(wanted)
        _check(set(sys.modules) - before, path)
        note(f"ready: {len(sys.modules) - len(before)} modules are imported before its turn")
        OutOfSight(hooks).hide()
        for name in set(sys.path_importer_cache) - finders - set(sys.path):
            del sys.path_importer_cache[name]
        supervisor.send(READY)
        _take_turn(supervisor, socket)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    note("its turn has come")


def _told(supervisor: Any, what: bytes) -> list[str]:
    """What the supervisor says in one message. Raises EOFError where it has gone."""
    words = supervisor.recv(_MOST_BYTES).split(b"\0")
    if words[0] != what:
        raise EOFError(f"no word of its {os.fsdecode(what)}")
    return [os.fsdecode(word) for word in words[1:]]


def _take_turn(supervisor: Any, socket: Any) -> None:
    """Have the rest of the environment: the first words are of descriptors, in their order, which come along."""
    int_bytes = 4
    data, ancillary, flags, _ = supervisor.recvmsg(
        _MOST_BYTES, socket.CMSG_SPACE(_MOST_DESCRIPTORS * int_bytes), socket.MSG_CMSG_CLOEXEC
    )
    words = data.split(b"\0")
    if words[0] != GO:
        raise EOFError("it was not given its turn")
    if flags & socket.MSG_CTRUNC:
        raise OSError("not all descriptors of its state have come: it may have no more (ulimit -n)")
    fds = [
        int.from_bytes(numbers[at : at + int_bytes], sys.byteorder)
        for _, _, numbers in ancillary
        for at in range(0, len(numbers) - len(numbers) % int_bytes, int_bytes)
    ]
    more: dict[bytes, bytes] = {}
    for word in words[1:]:
        name, has_value, value = word.partition(b"=")
        if not has_value:
            number = fds.pop(0)
            os.set_inheritable(number, True)  # as they would have been inherited
            value = b"%d" % number
        more[name] = value
    os.environb.update(more)


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


def _check(imported: Iterable[str], path: Sequence[str]) -> None:
    """See that the script would have imported the same, and that no GPU knows of this process. Raises RuntimeError."""
    from _frozen_importlib_external import PathFinder

    for name in sorted(imported):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if "." in name or name == _OWN or spec is None or not spec.has_location:
            continue
        found = PathFinder.find_spec(name, list(path))
        if found is not None and found.origin != spec.origin:
            raise RuntimeError(f"the script's {name} is {found.origin}, and {spec.origin} was imported")
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
        self._modules: dict[str, ModuleType] = {}
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
            self._modules[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Its own, by which it is not loaded again but given; None for every other module."""
        found: ModuleSpec | None = self._spec if name == _TORCH else None
        return found

    def _give(self, _spec: ModuleSpec) -> ModuleType:
        return self._modules[_TORCH]

    def _show(self, _module: ModuleType) -> None:
        del self._spec.loader.create_module, self._spec.loader.exec_module
        sys.meta_path.remove(self)
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)
        self._hooks.let_go()


def _end(why: str) -> NoReturn:
    """Quietly: whoever has started it starts another one, also where this fails in its turn."""
    note(f"ended before its turn: {why}")
    os._exit(_NOT_ITS_TURN)
