"""One communicator group of this process: how its backend is disconnected and connected.

Two mechanisms. `suspend`: NCCL releases the communicator's GPU memory and keeps the communicator. `replace`: the
backend is aborted, and a new one is registered in the same `ProcessGroup`. The `ProcessGroup` stays, because DDP, FSDP,
device meshes and compiled code refer to it, and ask it for its backend at each communication.

A new backend is registered under a backend type of its own, because `ProcessGroup` silently keeps the old backend of a
known type (torch 2.4 to 2.15). Types have 8 bits, so there are 192 replacements. This module has the state of one
group; `communicators` decides the order of groups, and that all ranks do the same.
"""

from __future__ import annotations

import sys

from ..errors import HegmError
from .messages import counts_of
from .notes import note
from .refusals import DEBUG_HINT, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .messages import MessageCounts
    from .nccl_library import Library

NCCL, GLOO = "nccl", "gloo"
SUSPEND, REPLACE, NONE = "suspend", "replace", "none"
#: States of a group: in use, suspended, aborted, or unknown after a failed call.
UP, SUSPENDED, ABORTED, UNKNOWN = "up", "suspended", "aborted", "unknown"
#: How often the backend of one group can be replaced: types 64 to 255 are no backend's of PyTorch's own.
MAX_REPLACEMENTS = 192
_FIRST_TYPE = 64
# The methods that end a backend's communicators at once: the first that exists is called. torch 2.4 has the last only.
_ABORTS = ("abort", "_abort", "_shutdown")
_CLASSES = {"ProcessGroupNCCL": NCCL, "ProcessGroupGloo": GLOO}


def backends_of(group: Any) -> list[tuple[Any, list[Any]]]:
    """Return the backends of a ProcessGroup, each once, with its devices."""
    found: list[tuple[Any, list[Any]]] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        known = next((devices for other, devices in found if other is backend), None)
        if known is None:
            found.append((backend, [device]))
        else:
            known.append(device)
    return found


def kind_of(backend: Any) -> str:
    """`nccl`, `gloo`, or the name of its class."""
    name = type(backend).__name__
    return _CLASSES.get(name, name)


def abort_backend(backend: Any) -> bool:
    """End its communicators, which waits for no other rank; False if it cannot: gloo before torch 2.6."""
    abort = next((getattr(backend, name) for name in _ABORTS if hasattr(backend, name)), None)
    if abort is not None:
        abort()
    return abort is not None


class GroupBackend:
    """The backend of one group that has other ranks, and its state."""

    def __init__(self, torch: Any, group: Any, store: Any, backend: Any, devices: list[Any]) -> None:
        self._torch = torch
        self._group = group
        self._store = store
        self._backend = backend
        self._devices = devices
        self._replaced = 0
        # The number of the backend has gloo's messages too: those of an earlier backend are not among them.
        self._earlier_messages = 0
        prefix = torch.distributed.PrefixStore
        #: The stores in which this backend may have met its ranks: the store itself, or below the name that PyTorch
        #: gives its device.
        self._met_in = [store, *(prefix(f"{device.type}/", store) for device in devices)]
        self.state = UP
        self.name = str(group.group_name)
        self.kind = kind_of(backend)
        #: The GPU of its communicator, by number in this process; None if it has no communicator yet.
        self.gpu: int | None = None

    @property
    def size(self) -> int:
        return int(self._group.size())

    @property
    def rank(self) -> int:
        """The rank of this process in it."""
        return int(self._group.rank())

    @property
    def messages(self) -> MessageCounts | None:
        """Return the messages that this rank has started to send and to receive in it; None if they are unknown."""
        return counts_of(self._group)

    @property
    def collectives(self) -> int:
        """Return how many collectives this rank has started in it. All ranks have the same number at one boundary.

        If its messages are unknown, those of gloo are among them.
        """
        try:
            number = int(self._backend._get_sequence_number_for_group())
        except RuntimeError:
            return 0  # this version does not count them for that backend
        messages = self.messages if self.kind == GLOO else None
        return number if messages is None else number - messages.total + self._earlier_messages

    @property
    def config(self) -> Any:
        """Return NCCL's settings of its communicator, or None."""
        return getattr(getattr(self._backend, "options", None), "config", None)

    @property
    def can_be_replaced(self) -> bool:
        """Return True if a backend type is left."""
        return self._replaced < MAX_REPLACEMENTS

    def is_of(self, group: Any, backend: Any) -> bool:
        return self._group is group and self._backend is backend

    def gpus(self) -> list[int]:
        """Return the GPUs on which it has a communicator of all its ranks, by number in this process.

        `_comm_ptr` answers for the current device, 0 without a communicator. It creates none.
        """
        pointer: Any = getattr(self._backend, "_comm_ptr", None)
        found: list[int] = []
        if pointer is None:
            return found
        for gpu in _gpus_in_use(self._torch):
            with self._torch.cuda.device(gpu):
                if int(pointer() or 0):
                    found.append(gpu)
        return found

    def has_pairs(self) -> bool:
        """Return True if `send` or `recv` made communicators of two ranks, which `_comm_ptr` does not report.

        Their first rank stores the id under the numbers of both in the group's store.
        """
        rank = int(self._group.rank())
        for store in self._met_in:
            for other in range(self.size):
                if other != rank and store.check([f"{min(rank, other)}:{max(rank, other)}"]):
                    return True
        return False

    def can_suspend(self, library: Library | None) -> bool:
        """Return True if this NCCL can suspend it. Does not check for pairs that `send` made."""
        return self.kind == NCCL and library is not None and library.can_suspend and hasattr(self._backend, "_comm_ptr")

    def mechanism(self, library: Library | None) -> str:
        """Return the best state that this rank can bring it to now. All ranks have to do the same."""
        self._note_gpu()
        if self.kind != NCCL or not hasattr(self._backend, "_comm_ptr") or self.has_pairs():
            return REPLACE
        if not self.gpus():
            return NONE  # NCCL connects a group at its first collective
        return SUSPEND if self.can_suspend(library) else REPLACE

    # ---- down and up -------------------------------------------------------------------------------------------------

    def suspend(self, library: Library) -> None:
        """Release the GPU memory of its communicator. Waits for its ranks. Raises HegmError."""
        self._note_gpu()
        with self._on_gpu():
            self.state = UNKNOWN
            library.suspend(int(self._backend._comm_ptr()))
            self.state = SUSPENDED

    def resume(self, library: Library) -> None:
        """Allocate it again. Waits for its ranks. Raises HegmError."""
        with self._on_gpu():
            self.state = UNKNOWN
            library.resume(int(self._backend._comm_ptr()))
            self.state = UP

    def abort(self) -> None:
        """End its communicators, which waits for no other rank. Raises HegmError."""
        self._note_gpu()
        self.state = UNKNOWN
        try:
            is_aborted = abort_backend(self._backend)
        except Exception as error:
            raise refusal(f"group {self.name} cannot be aborted: {error}", DEBUG_HINT) from error
        if not is_aborted and self.kind == NCCL:  # gloo's connections are no obstacle to the driver
            raise refusal(f"group {self.name} cannot be aborted by this PyTorch", "use PyTorch 2.4 or newer")
        self.state = ABORTED

    def replace(self, label: str) -> None:
        """Connect a new backend under that label, which all ranks have to name. Raises HegmError.

        It connects here, and its first collective runs here, so that an error appears here and not in a training step.
        """
        if self.state != ABORTED:
            self.abort()
        if not self.can_be_replaced:
            raise refusal(f"group {self.name} was replaced {MAX_REPLACEMENTS} times already", "restart the job")
        self.state = UNKNOWN
        try:
            with self._on_gpu():
                store = self._torch.distributed.PrefixStore(f"hegm/{label}/", self._store)
                made = self._make(store)
                self._connect(made)
                self._register(made)
                self._earlier_messages = 0 if self.messages is None else self.messages.total
                self._met_in = [store]
        except HegmError:
            raise
        except Exception as error:
            raise refusal(f"group {self.name} cannot connect again: {error}", DEBUG_HINT) from error
        self.state = UP

    def _make(self, store: Any) -> Any:
        """Return a new backend with the options of the old one."""
        place = (store, int(self._group.rank()), self.size)
        old: Any = getattr(self._backend, "options", None)
        if self.kind == GLOO:
            timeout = getattr(old, "_timeout", None) or self._torch.distributed.distributed_c10d.default_pg_timeout
            made = type(self._backend)(*place, timeout=timeout)
            _copy(old, getattr(made, "options", None), ("global_ranks_in_group", "group_name"))
        else:
            options: Any = old.__class__()
            names = ("is_high_priority_stream", "_timeout", "global_ranks_in_group", "group_name", "config")
            _copy(old, options, names)
            made = type(self._backend)(*place, options)
        try:
            made._get_sequence_number_for_group()
        except RuntimeError:  # torch before 2.15 has gloo count from a number that its ranks agree on
            made._set_sequence_number_for_group()
        return made

    def _connect(self, made: Any) -> None:
        """Have it connect its ranks now: the sum of ones over all ranks is their number."""
        torch = self._torch
        device = torch.device("cpu") if self.kind == GLOO else torch.device("cuda", self.gpu or 0)
        bound = getattr(self._group, "bound_device_id", None)
        # A backend connected like this sends to a peer through the communicator of all ranks. Others have pairs.
        if self.kind == NCCL and bound is not None:
            made.eager_connect_single_device(device)
        ones = torch.ones(1, device=device)
        made.allreduce([ones]).wait()
        if int(ones.item()) != self.size:
            raise refusal(f"group {self.name} counts {int(ones.item())} ranks of {self.size}", DEBUG_HINT)

    def _register(self, made: Any) -> None:
        """Put it in the place of the old one. A ProcessGroup answers for its name by its first backend."""
        torch, group = self._torch, self._group
        description = _description(group)
        while not all(group._get_backend(device) is made for device in self._devices):
            if not self.can_be_replaced:
                raise refusal(f"group {self.name} kept its aborted backend", DEBUG_HINT)
            kind = torch.distributed.ProcessGroup.BackendType(_FIRST_TYPE + self._replaced)
            self._replaced += 1
            for device in self._devices:
                group._register_backend(device, kind, made)
        self._backend = made
        for name, value in (("_set_group_name", self.name), ("_set_group_desc", description)):
            if value is not None and hasattr(group, name):
                getattr(group, name)(value)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _note_gpu(self) -> None:
        """Record the GPU while a communicator reports it."""
        if self.kind != NCCL or self.state != UP:
            return
        found = self.gpus()
        bound = getattr(self._group, "bound_device_id", None)
        if found:
            self.gpu = found[0]
        elif bound is not None:
            self.gpu = bound.index
        elif self.gpu is None:
            self.gpu = next(iter(_gpus_in_use(self._torch)), None)

    def _on_gpu(self) -> Any:
        """Select its GPU: the agent's thread has device 0 current, whatever the training thread has."""
        return _CurrentDevice() if self.gpu is None else self._torch.cuda.device(self.gpu)


class _CurrentDevice:
    """The current device stays as it is."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _gpus_in_use(torch: Any) -> list[int]:
    """Return the GPUs that this process has memory on; without any, those with a context."""
    gpus = range(int(torch.cuda.device_count()))
    used = [gpu for gpu in gpus if torch.cuda.memory_reserved(gpu)]
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if used or has_context is None:
        return used
    return [gpu for gpu in gpus if has_context(gpu)]


def _copy(old: Any, new: Any, names: tuple[str, ...]) -> None:
    """Copy these options to the new object, if this version has them."""
    for name in names:
        if not hasattr(old, name) or not hasattr(new, name):
            continue
        try:
            setattr(new, name, getattr(old, name))
        except (AttributeError, TypeError) as error:
            note(f"option {name} of a group is not copied: {error}")


def _description(group: Any) -> str | None:
    try:
        return str(group.group_desc)
    except (AttributeError, RuntimeError):
        return None


def torch_distributed() -> Any:
    """Return PyTorch's module of the groups if the process has initialised it, or None."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is not None and is_initialized() else None
