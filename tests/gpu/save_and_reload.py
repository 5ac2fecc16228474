"""How long a training is away when it saves its state with torch.save, ends, and starts again from that file.

python3 -m tests.gpu.save_and_reload FOLDER [GIB]

An AdamW training fills the GPU with so many GiB: parameters, gradients and the two moments of the optimizer. The
downtime is from the end of its last step to the end of the first step of the next process. Print a JSON line a round.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch


def train(path: Path, gib: int, *, load: bool) -> None:
    """Take three steps, saving after the last one unless `load`: then load first and take one step."""
    laps = {"import": time.time()}
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(gib)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    laps["build"] = time.time()
    if load:
        saved = torch.load(path, map_location="cuda", mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        del saved
        torch.cuda.synchronize()
        laps["load"] = time.time()
    for _ in range(1 if load else 3):
        model(torch.randn(64, 8192, device="cuda")).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
    laps["step"] = time.time()
    if not load:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        laps["save"] = time.time()
    print(json.dumps(laps), flush=True)


def measure(folder: Path, gib: int) -> None:
    path = folder / "state.pt"
    times = []
    for word in ("save", "load"):
        command = [sys.executable, __file__, str(folder), str(gib), word]
        times.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    first, second = times
    marks = [first["step"], first["save"], *(second[name] for name in ("import", "build", "load", "step"))]
    names = ("save", "exit and import", "build", "load", "step")
    record = {name: round(b - a, 3) for name, a, b in zip(names, marks[:-1], marks[1:], strict=True)}
    record["file_gib"] = round(path.stat().st_size / 2**30, 2)
    path.unlink()
    print(json.dumps({"folder": str(folder), "downtime_s": round(marks[-1] - marks[0], 3), **record}), flush=True)


if __name__ == "__main__":
    where, size_gib = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32
    if len(sys.argv) > 3:
        train(where / "state.pt", size_gib, load=sys.argv[3] == "load")
    else:
        for _ in range(3):
            measure(where, size_gib)
