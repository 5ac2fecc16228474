"""Imported before PyTorch itself: it comes without its compiler, in less than half of the time and of the memory.

An optimizer imports `torch._dynamo`, a second of processor and a thousand modules, for two functions that do nothing
where nothing is compiled; here is a module with these two. The collector, which would look through all of that again
and again and find nothing, rests meanwhile. Some scripts do without this one: those that are about PyTorch itself,
those that are restarted, for which all that was imported is imported beforehand, and ranks, whose `torch.distributed`
asks the compiler for more.
"""

import gc
import sys
import types


def disable(function, recursive=True, *, reason=None, wrapping=True):
    return function


def graph_break():
    """Nothing is traced."""


if "torch" not in sys.modules:
    gc.disable()
    import torch

    gc.enable()
    torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
    vars(torch._dynamo).update(disable=disable, graph_break=graph_break)
