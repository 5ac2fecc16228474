"""Imported before PyTorch itself: it comes without its compiler, in less than half of the time and of the memory.

An optimizer imports `torch._dynamo`, a second of processor and a thousand modules, for two functions that do nothing
where nothing is compiled, and what exports models is not wanted either; nor is what operators come to without numbers,
a fifth of what is left. The collector, which would look through all that is imported again and again and find nothing,
seldom looks. Some scripts do without this one: those that are about PyTorch itself. Those that are restarted get it
from the environment (brisk/sitecustomize.py), as what is imported beforehand for them has to, and so do ranks, whose
launcher imports PyTorch as well.
"""

import gc
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

LEFT_OUT = {"torch._dynamo", "torch.export"}
# Gets the settings for deterministic algorithms.
TOLD = {"torch._inductor", "torch._inductor.config"}
# NVIDIA's bindings, which PyTorch imports if they are installed, for CUDA graphs, which a CPU does not use.
NOT_THERE = "cuda.bindings"
META = "torch._meta_registrations"  # what operators do without numbers, and with it all that is made of other operators


class Hollow:
    """Finds and loads modules in the places of these, with the few functions that are called, and nothing else."""

    @classmethod
    def find_spec(cls, name, _path=None, _target=None):
        is_left_out = name in LEFT_OUT or name in TOLD or name == META
        return ModuleSpec(name, cls, is_package=name in TOLD) if is_left_out else None

    @staticmethod
    def create_module(_spec):
        return None

    @staticmethod
    def exec_module(module):
        if module.__name__ == META:
            begin_generators()
            return
        module.disable = disable
        module.graph_break = graph_break
        module.utils = SimpleNamespace(get_optimize_ddp_mode=get_optimize_ddp_mode)
        module.trace_rules = SimpleNamespace(clear_lru_cache=clear_lru_cache)


def disable(function, recursive=True, *, reason=None, wrapping=True):
    return function


def graph_break():
    """Nothing is traced."""


def get_optimize_ddp_mode():
    """The compiler option that ranks query, with its default."""
    return "ddp_optimizer"


def clear_lru_cache():
    """Ranks that meet have the compiler forget what it had derived without them."""


def begin_generators():
    """The one part of the omitted modules that every script needs: without it there is no torch.Generator."""
    from torch import _C
    from torch._opaque_base import OpaqueBaseMeta

    if hasattr(_C, "_set_generator_metaclass"):
        _C._set_generator_metaclass(OpaqueBaseMeta)


if "torch" not in sys.modules:
    gc.set_threshold(100_000, 50, 100)
    sys.meta_path.insert(0, Hollow)
    sys.modules[NOT_THERE] = None
