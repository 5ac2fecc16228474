"""Runs in a prestarted process: imports PyTorch, then waits for its turn before the script's first line.

The supervisor starts it with the job's command, while the process that it replaces still trains. Over a socket pair the
supervisor names the modules to import. The turn comes over the same socket, with the missing environment variables and
the descriptors of the state. Shortly before a late turn the supervisor names the modules again. Any other end of the
conversation, such as the supervisor's exit, ends this process, so a job never has two.

The script must not see a difference. All imported modules must be those that the script's search path leads to, and
unchanged on disk. No GPU may be open. PyTorch stays hidden until the script imports it, and the agent does its work
then. Environment variables that no code here has read can still change: `unread` names them for the supervisor. While
the process waits, the kernel ends it first when memory runs short.
"""

from __future__ import annotations

import os
import sys

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, NoReturn, Protocol

    class Hooks(Protocol):
        """The agent's hooks at PyTorch's imports."""

        def hold(self) -> None:
            """Defer the work of all imports until `run_deferred`."""
            ...

        def run_deferred(self) -> None:
            """Do the deferred work now."""
            ...

    Mark = tuple[int, int, int, int]


CUDA = "CUDA_VISIBLE_DEVICES"
# The first is read by the agent alone. The others are read by PyTorch for ROCm and AMD's runtime.
_OURS, _AMDS = ("HEGM_GPU",), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DRIVER = "libcuda.so"
_NOT_INITIALIZED = 3

#: This process's end of the socket pair; the supervisor sets it in a process that it prestarts.
READY_FD = "HEGM_READY_FD"
#: Set if the supervisor asks which variables can still be set or removed.
TELL_UNREAD = "HEGM_READY_TELL"
IMPORTS, PATH, READY, GO = b"imports", b"path", b"ready", b"go"
_TORCH = "torch"
_OWN = "_hegm"
# Modules of the agent that PyTorch's import starts. Importing them starts nothing.
_ITS_OWN = ("lifecycle", "storage_transfer", "channel", "boundary", "state.session", "state.restore")
_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 4
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
# With this status the supervisor knows that the process never ran the script. See client/hegmctl/supervisor.py.
_NOT_ITS_TURN = 97
#: The variables that the activation set; None for one that it removed. The script began with these, but the kernel
#: keeps reporting the environment at the process's start.
by_turn: dict[bytes, bytes | None] = {}


def unread() -> list[str]:
    """Return the environment variables that no code in this process can have read, so that they can still change.

    The list is short: for other variables an import could have read them (OpenMP reads OMP_NUM_THREADS, MKL reads
    MKL_*, PyTorch reads PYTORCH_* and TORCH_*). NVIDIA's driver reads its variable in `cuInit` and never again. ROCm's
    runtime reads its variables when it is loaded, as far as is known, so there they count as read.
    """
    version = sys.modules.get("torch.version")
    if getattr(version, "hip", None) is not None:
        return [*_OURS]
    return [*_OURS, *_AMDS, *([CUDA] if _is_driver_untouched() else [])]


def _is_driver_untouched() -> bool:
    """Return whether `cuInit` was never called: then every other driver function answers CUDA_ERROR_NOT_INITIALIZED.

    PyTorch reads the variable itself only to count GPUs, and keeps the count only once CUDA is initialised.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = {line.rstrip("\n").partition("/")[2] for line in file if _DRIVER in line}
    except OSError:
        return False
    if not paths:
        return True
    if os.environ.get(CUDA, "0").strip() in ("", "-1"):
        return False  # a cuInit that found no GPU failed, and looks like one that was never called
    return all(_answer(f"/{path}") == _NOT_INITIALIZED for path in paths)


def _answer(path: str) -> int | None:
    """Return the library's answer to a request for the number of GPUs; None if it cannot be called."""
    ctypes: Any = __import__("ctypes")
    try:
        return int(ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
    except (OSError, AttributeError):
        return None


class Sources:
    """The files of the recorded modules and of the interpreter. `check` tells whether they are still the same.

    An installation or an edit can replace a module's file after its import. Files are compared by size, time of change
    and inode, and are not read.
    """

    def __init__(self) -> None:
        self._marks: dict[str, Mark | None] = {}
        for path in ("/proc/self/exe", sys.executable):
            self._marks[path] = _mark(path)

    def note(self, modules: Iterable[ModuleType]) -> None:
        """Record the files of these modules, if they are new."""
        for module in list(modules):
            spec = getattr(module, "__spec__", None)
            origin = None if spec is None or not spec.has_location else spec.origin
            if isinstance(origin, str) and origin not in self._marks:
                self._marks[origin] = _mark(origin)

    def check(self) -> None:
        """Raise RuntimeError with the first file that changed or no longer exists."""
        for path, before in self._marks.items():
            if _mark(path) != before:
                raise RuntimeError(f"{path} has changed since it was imported")


def _mark(path: str) -> Mark | None:
    """Return the file's identity; None if it is not a file, such as a module in an archive."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def wait_for_turn(hooks: Hooks) -> None:
    """Return once it is this process's turn, at once if it was not prestarted. Otherwise end the process."""
    line = os.environ.pop(READY_FD, None)  # first of all, because imports may start Pythons of their own
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
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a traceback
    waiting = _ImportedModules(hooks, tells=tells)
    socket: Any = __import__("socket")
    with socket.socket(fileno=fd) as supervisor, _KilledFirst():
        waiting.get_ready(supervisor, _paths_in(_heard(supervisor), IMPORTS))
        while True:
            data, fds = _heard_with_descriptors(supervisor, socket)
            if data.split(b"\0")[0] != IMPORTS:
                break
            waiting.get_ready(supervisor, _paths_in(data, IMPORTS))
        waiting.check()
        _take_turn(data, fds)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    note("its turn has come")


class _ImportedModules:
    """The modules that the process has imported so far, and their files."""

    def __init__(self, hooks: Hooks, *, tells: bool) -> None:
        self._hooks, self._tells = hooks, tells
        self._before = set(sys.modules)
        self._finders = set(sys.path_importer_cache)
        self._path: Sequence[str] = ()
        self._sources = Sources()
        self._hidden: HiddenTorch | None = None

    def get_ready(self, supervisor: Any, modules: Iterable[str]) -> None:
        """Import what is missing, check that the script would import the same, and report readiness."""
        self._path = _paths_in(_heard(supervisor), PATH)
        if self._hidden is None:
            self._hooks.hold()
            _import(modules)
        elif self._hidden.bring_back():
            _import(modules)
        self._sources.note(sys.modules.values())
        self.check()
        _check_devices()
        names = unread() if self._tells else []
        note(f"ready: {len(sys.modules) - len(self._before)} modules are imported in advance")
        self._hidden = self._hidden or HiddenTorch(self._hooks)
        self._hidden.hide()
        for name in set(sys.path_importer_cache) - self._finders - set(sys.path):
            del sys.path_importer_cache[name]
        supervisor.send(b"\0".join([READY, *(name.encode() for name in names)]))

    def check(self) -> None:
        """Check that the script would import the same now, and that no file has changed. Raises RuntimeError."""
        self._sources.check()
        hidden = {} if self._hidden is None else self._hidden.modules
        known = {**sys.modules, **hidden}
        _check_path({name: known[name] for name in known.keys() - self._before}, self._path)


class _KilledFirst:
    """While entered, the kernel ends this process first when memory runs short, before any that trains."""

    _PATH, _FIRST = "/proc/self/oom_score_adj", b"1000"

    def __enter__(self) -> None:
        try:
            with open(self._PATH, "r+b", buffering=0) as file:
                self._before: bytes | None = file.read()
                file.write(self._FIRST)
        except OSError as error:  # as where /proc may not be written to
            self._before = None
            note(f"the kernel does not end this process first: {error}")

    def __exit__(self, *_exc: object) -> None:
        """Raises OSError: a training must not keep this setting."""
        if self._before is not None:
            with open(self._PATH, "r+b", buffering=0) as file:
                file.write(self._before)


def _heard(supervisor: Any) -> bytes:
    data: bytes = supervisor.recv(_MAX_BYTES)
    return data


def _paths_in(data: bytes, what: bytes) -> list[str]:
    """Return the words of one message from the supervisor. Raises EOFError if it is gone."""
    words = data.split(b"\0")
    if words[0] != what:
        raise EOFError(f"no word of its {os.fsdecode(what)}")
    return [os.fsdecode(word) for word in words[1:]]


def _heard_with_descriptors(supervisor: Any, socket: Any) -> tuple[bytes, list[int]]:
    """Return the next message and its descriptors. Raises OSError if some are missing."""
    int_bytes = 4
    data, ancillary, flags, _ = supervisor.recvmsg(
        _MAX_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * int_bytes), socket.MSG_CMSG_CLOEXEC
    )
    if flags & socket.MSG_CTRUNC:
        raise OSError("some descriptors of its state are missing: the process may have reached its limit (ulimit -n)")
    fds = [
        int.from_bytes(numbers[at : at + int_bytes], sys.byteorder)
        for _, _, numbers in ancillary
        for at in range(0, len(numbers) - len(numbers) % int_bytes, int_bytes)
    ]
    return data, fds


def _take_turn(data: bytes, fds: list[int]) -> None:
    """Set the rest of the environment. Words without a value name the received descriptors, in order; values
    without a name are variables to remove. Raises EOFError for another message.
    """
    words = data.split(b"\0")
    if words[0] != GO:
        raise EOFError("it was not activated")
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


def _import(modules: Iterable[str]) -> None:
    """Import these modules in order, without warnings. The script meets an import that fails."""
    warnings: Any = __import__("warnings")
    show, warnings.showwarning = warnings.showwarning, _ignore
    gc: Any = __import__("gc")
    collects = gc.isenabled()
    # modules are no garbage, and collecting a million of their objects again and again takes a third of the time
    gc.disable()
    try:
        for name in modules:
            if name not in sys.modules and (name.partition(".")[0] in (_TORCH, "numpy")):
                try:
                    __import__(name)
                except Exception as error:  # noqa: BLE001 - of whatever kind
                    note(f"{name} is not imported in advance: {error!r}")
        for name in _ITS_OWN:
            __import__(f"{__package__}.{name}")
    finally:
        warnings.showwarning = show
        gc.freeze()
        gc.unfreeze()  # moves them to the oldest generation, where they would be by now
        if collects:
            gc.enable()


def _ignore(*_args: object, **_named: object) -> None:
    """Drop a warning."""


def _check_path(imported: Mapping[str, ModuleType], path: Sequence[str]) -> None:
    """Check that the script would import the same by its own search path. Raises RuntimeError."""
    from _frozen_importlib_external import PathFinder

    for name, module in sorted(imported.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or name == _OWN or spec is None or not spec.has_location:
            continue
        found = PathFinder.find_spec(name, list(path))
        if found is not None and found.origin != spec.origin:
            raise RuntimeError(f"the script's {name} is {found.origin}, and {spec.origin} was imported")


def _check_devices() -> None:
    """Check that no GPU has a context of this process. Raises RuntimeError."""
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


class HiddenTorch:
    """Hides the imported PyTorch until the script imports it; then it is there at once, and the agent starts."""

    def __init__(self, hooks: Hooks) -> None:
        """Raises AttributeError if its loader takes no attributes."""
        self._hooks = hooks
        #: The modules that are hidden now.
        self.modules: dict[str, ModuleType] = {}
        torch = sys.modules.get(_TORCH)
        self._spec: Any = None if torch is None else torch.__spec__
        if self._spec is not None:
            loader: Any = self._spec.loader
            loader.create_module, loader.exec_module = self._give, self._show

    def hide(self) -> None:
        """Take it out of sight, if it was imported at all."""
        if self._spec is None:
            self._hooks.run_deferred()
            return
        for name in [name for name in sys.modules if name == _TORCH or name.startswith(_TORCH + ".")]:
            self.modules[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def bring_back(self) -> bool:
        """Make PyTorch visible for a while, with the agent's hooks deferred. Returns False if it was not imported."""
        if self._spec is None:
            return False
        sys.meta_path.remove(self)
        sys.modules.update(self.modules)
        self.modules.clear()
        return True

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return PyTorch's own spec, which returns the loaded module; None for all other names."""
        found: ModuleSpec | None = self._spec if name == _TORCH else None
        return found

    def _give(self, _spec: ModuleSpec) -> ModuleType:
        return self.modules[_TORCH]

    def _show(self, _module: ModuleType) -> None:
        del self._spec.loader.create_module, self._spec.loader.exec_module
        sys.meta_path.remove(self)
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)
        self._hooks.run_deferred()


def _end(why: str) -> NoReturn:
    """End quietly: the supervisor starts another process."""
    note(f"ended before it was activated: {why}")
    os._exit(_NOT_ITS_TURN)
