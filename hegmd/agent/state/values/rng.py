"""Random generators as plain numbers and bytes: the global ones, and objects of the script.

Reads `sys.modules` and imports nothing: a module that was not imported has drawn nothing.
"""

from __future__ import annotations

import ctypes
import sys

from .duck_types import is_a

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any


# ---- the global generators -------------------------------------------------------------------------------------------

#: In the state of a generator of NumPy.
_SPAWNED = "spawned"
#: States of GPUs that this process lacks, kept for a later process that has them.
_absent: dict[str, Any] = {}


def read_shared(*, with_gpus: bool = True) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's global generators by name, with its GPUs' if wanted."""
    states: dict[str, Any] = {}
    random, numpy, torch = _modules()
    if random is not None:
        states["python"] = random.getstate()
    if numpy is not None:
        states["numpy"] = _plain_of_numpy(numpy.random.get_state(legacy=False))
    if torch is not None:
        states["torch"] = _bytes_of(torch.random.get_rng_state())
        for index in range(_number_of_gpus(torch) if with_gpus else 0):
            states[f"cuda:{index}"] = _bytes_of(torch.cuda.get_rng_state(index))
    return {**_absent, **states} if with_gpus else states


def set_shared(states: Mapping[str, Any]) -> None:
    """Set the states whose module or GPU is present. Keep those of absent GPUs."""
    random, numpy, torch = _modules()
    if random is not None and "python" in states:
        random.setstate(states["python"])
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(_numpy_of_plain(numpy, states["numpy"]))
    if torch is None:
        return
    if "torch" in states:
        torch.random.set_rng_state(_tensor_of(torch, states["torch"]))
    of_gpus = {name: state for name, state in states.items() if name.startswith("cuda:")}
    # PyTorch keeps the state of an unused GPU until it is used.
    present = int(torch.cuda.device_count()) if of_gpus and torch.cuda.is_available() else 0
    for name, state in of_gpus.items():
        index = int(name.partition(":")[2])
        if index < present:
            torch.cuda.set_rng_state(_tensor_of(torch, state), index)
            _absent.pop(name, None)
        else:
            _absent[name] = state


# ---- objects --------------------------------------------------------------------------------------------------------


def is_generator(found: object) -> bool:
    """Return True for a generator object of one of the three, except the global ones."""
    random, numpy, torch = _modules()
    return not _is_shared(found) and (
        (random is not None and is_a(found, random.Random) and not is_a(found, random.SystemRandom))
        or (numpy is not None and is_a(found, numpy.random.Generator, numpy.random.RandomState))
        or (numpy is not None and is_a(found, numpy.random.SeedSequence))
        or (torch is not None and is_a(found, torch.Generator))
    )


def _is_shared(found: object) -> bool:
    """Return True for a generator that `read_shared` reads: module functions share it."""
    random, numpy, torch = _modules()
    return found is not None and any(
        found is getattr(module, name, None)
        for module, name in (
            (random, "_inst"),
            (getattr(getattr(numpy, "random", None), "mtrand", None), "_rand"),
            (torch, "default_generator"),
        )
    )


def read(generator: Any) -> Any:
    random, numpy, _torch = _modules()
    if random is not None and is_a(generator, random.Random):
        return generator.getstate()
    if numpy is not None and is_a(generator, numpy.random.Generator):
        spawned = _spawned(generator.bit_generator)
        state: dict[str, Any] = _plain_of_numpy(generator.bit_generator.state)
        return {**state, _SPAWNED: spawned} if spawned else state
    if numpy is not None and is_a(generator, numpy.random.SeedSequence):
        return {_SPAWNED: generator.n_children_spawned}
    if numpy is not None and is_a(generator, numpy.random.RandomState):
        return _plain_of_numpy(generator.get_state(legacy=False))
    return _bytes_of(generator.get_state())


def fits(generator: Any, state: Any) -> bool:
    """Return True if the state is of such a generator: PyTorch's differ between GPU and CPU."""
    _random, _numpy, torch = _modules()
    if torch is None or not is_a(generator, torch.Generator):
        return True
    return bool(generator.get_state().numel() == len(state))


def set_to(generator: Any, state: Any) -> None:
    random, numpy, torch = _modules()
    if random is not None and is_a(generator, random.Random):
        generator.setstate(state)
    elif numpy is not None and is_a(generator, numpy.random.Generator):
        spawned: int = state.get(_SPAWNED, 0)
        known = {key: value for key, value in state.items() if key != _SPAWNED}
        generator.bit_generator.state = _numpy_of_plain(numpy, known)
        if spawned:
            _spawn(generator.bit_generator.seed_seq, spawned)
    elif numpy is not None and is_a(generator, numpy.random.SeedSequence):
        _spawn(generator, state[_SPAWNED])
    elif numpy is not None and is_a(generator, numpy.random.RandomState):
        generator.set_state(_numpy_of_plain(numpy, state))
    else:
        generator.set_state(_tensor_of(torch, state))


def _spawned(bit_generator: Any) -> int:
    """Return how many children it has, whose number gives the next one its seed; 0 for a NumPy that does not tell."""
    return int(getattr(getattr(bit_generator, "seed_seq", None), "n_children_spawned", 0))


def _spawn(seeds: Any, count: int) -> None:
    """Have that many children, as NumPy offers no other way to count them."""
    seeds.spawn(max(0, count - seeds.n_children_spawned))


def held_by(owners: list[Any]) -> Iterator[Any]:
    """Yield the generators among the attributes of these objects, each once."""
    visited: set[int] = set()
    for owner in owners:
        for found in list(getattr(owner, "__dict__", {}).values()):
            if id(found) not in visited and is_generator(found):
                visited.add(id(found))
                yield found


# ---- forms ----------------------------------------------------------------------------------------------------------


def _modules() -> tuple[Any, Any, Any]:
    loaded = sys.modules
    numpy = loaded.get("numpy") if "numpy.random" in loaded else None
    torch = loaded.get("torch")
    return loaded.get("random"), numpy, torch if hasattr(torch, "random") else None


def _number_of_gpus(torch: Any) -> int:
    """Return the number of GPUs to read; 0 if the process has not used CUDA."""
    return int(torch.cuda.device_count()) if torch.cuda.is_initialized() else 0


def _bytes_of(tensor: Any) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _tensor_of(torch: Any, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _plain_of_numpy(value: Any) -> Any:
    if is_a(value, dict):
        return {key: _plain_of_numpy(found) for key, found in value.items()}
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return ("array", value.dtype.str, value.tobytes()) if value.shape else value.item()
    return value


def _numpy_of_plain(numpy: Any, value: Any) -> Any:
    if is_a(value, dict):
        return {key: _numpy_of_plain(numpy, found) for key, found in value.items()}
    if is_a(value, tuple) and value and value[0] == "array":
        _mark, kind, raw = value
        return numpy.frombuffer(raw, dtype=kind).copy()
    return value
