"""Imported before an optimizer is made: PyTorch without its compiler, in less than half of the time and of the memory.

An optimizer imports `torch._dynamo`, a second of processor and a thousand modules, for two functions that do nothing
where nothing is compiled. Here is a module with these two. Scripts that are about PyTorch itself do without this one.
"""

import sys
import types

import torch


def disable(function, recursive=True, *, reason=None, wrapping=True):
    return function


def graph_break():
    """Nothing is traced."""


if "torch._dynamo" not in sys.modules:
    torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
    vars(torch._dynamo).update(disable=disable, graph_break=graph_break)
