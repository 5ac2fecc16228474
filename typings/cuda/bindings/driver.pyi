# The package ships no types, and its functions take what CUDA takes: hegmd/gpu_helper/cuda.py narrows what comes out.
from typing import Any

def __getattr__(name: str) -> Any: ...
