"""The steps of HeGM 0.3.3's own README, as a program: launcher, ctrl, REST and lock, with what each answers.

Prints one JSON document, in which pids have names. It knows nothing of whose programs it runs, so that the record of
HeGM 0.3.3 and of ours can be laid beside one another:

    python3 -m tests.e2e.hegm_steps FOLDER_OF_THE_PROGRAMS

The training reads a line of its standard input before each batch, so that nothing depends on how fast anything is.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from tests.looks import pause

PATIENCE_S = 120.0
NOW_AND_THEN_S = 0.2
EPOCHS, BATCHES = 100, 4
TRAINING = f"""
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn({BATCHES * 2}, 4), torch.randn({BATCHES * 2}, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
print("ready", flush=True)
for epoch in range({EPOCHS}):
    for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=2)):
        if sys.stdin.readline() == "":
            sys.exit(5)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print(f"batch {{loss.item().hex()}}", flush=True)
"""


class Steps:
    """One launcher, its training, and the record of replies."""

    def __init__(self, programs: Sequence[str], folder: Path, environ: dict[str, str], *, hasty: bool) -> None:
        self._launcher, self._ctrl = shlex.split(programs[0]), shlex.split(programs[1])
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._environ = {
            **environ,
            "HEGM_CHECKPOINT_DIR": str(folder / "checkpoint"),
            "HEGM_POLL_INTERVAL": "0.05",
            "HEGM_CTRL_PORT": str(self._port),
            "HEGM_LOG_LEVEL": "QUIET",
            "HEGM_CTRL_CHECKPOINT_TIMEOUT": str(PATIENCE_S),
        }
        self._hasty = hasty
        self.record: list[Any] = []
        self.batches: list[str] = []
        self._known_worker = ""

    def run(self) -> None:
        script = self._folder / "train.py"
        script.write_text(TRAINING)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        words = [*self._launcher, sys.executable, "-u", str(script)]
        with subprocess.Popen(words, env=self._environ, text=True, **pipes) as process:  # type: ignore[call-overload] # two pipes
            self._process = process
            try:
                self._do()
            finally:
                process.kill()

    def _do(self) -> None:
        process, launcher = self._process, self._process.pid
        self._train(2, begins=True)
        worker = self._worker()
        self._note("which workers there are", sorted(os.listdir(self._folder / "checkpoint/.workers")))
        self._tell("checkpoint", "--all")
        self._tell("checkpoint", "--pid", str(2**22))
        self._tell("checkpoint")
        self._tell("checkpoint", "--all", "--pid", str(worker))
        self._while_it_trains(lambda: self._tell("checkpoint", "--pid", str(worker)))
        self._note("files after the checkpoint", self._files())
        self._note("what the lock says", (self._folder / f"checkpoint/{launcher}/lock").read_text())
        self._note("who is registered", os.listdir(self._folder / "checkpoint/.workers"))
        self._tell("resume", "--ppid", str(launcher), "1")
        self._train(2, begins=True)
        self._note("files while it trains again", self._files())
        worker = self._worker()
        self._while_it_trains(lambda: self._post("/checkpoint", {"pids": [worker]}))
        self._post("/checkpoint", {"all": True})
        self._post("/resume", {"ppids": [1], "all": True})
        self._post("/resume", {"ppids": ["x"]})
        self._post("/nothing", {})
        self._post("/resume", {"all": True})
        self._tell("resume", "--all")
        if self._hasty:
            self._ask_at_once(worker)
        self._train(1, begins=True)
        self._let_train(EPOCHS * BATCHES)
        while self._line():
            pass
        process.wait(PATIENCE_S)
        self._note("how the launcher ends", process.returncode)

    def _ask_at_once(self, before: int) -> None:
        """Once more, while the training has not even begun again; not in the record, since HeGM is not asked so."""
        recorded = len(self.record)
        deadline = monotonic() + PATIENCE_S
        while (worker := self._registered()) in (None, before):
            assert monotonic() < deadline, "no worker was started again"
            pause()
        self._known_worker = str(worker)  # it may have left, and its registration with it, when its answer is noted
        self._while_it_trains(lambda: self._tell("checkpoint", "--pid", str(worker)))
        answered = self.record.pop()[1]
        assert answered == [0, "PID WORKER: checkpoint-ready"], answered
        self._tell("resume", "--all")
        del self.record[recorded:]

    # ---- the training -----------------------------------------------------------------------------------------------

    def _train(self, batches: int, *, begins: bool = False) -> None:
        if begins:
            while self._line() != "ready\n":
                assert self._process.poll() is None, "the launcher has ended"
        for _ in range(batches):
            self._let_train()
            while not self._line().startswith("batch "):
                assert self._process.poll() is None, "the launcher has ended"

    def _line(self) -> str:
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline()
        if line.startswith("batch "):
            self.batches.append(line.rstrip("\n"))
        return line

    def _let_train(self, batches: int = 1) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n" * batches)
        self._process.stdin.flush()

    def _while_it_trains(self, act: Any) -> None:
        """Do it, with a batch every now and then: a request is taken at the next boundary after it has come."""
        acting = threading.Thread(target=act)
        acting.start()
        while acting.is_alive():
            self._let_train()
            acting.join(NOW_AND_THEN_S)

    def _worker(self) -> int:
        return int((self._folder / f"checkpoint/.workers/{self._process.pid}").read_text())

    def _registered(self) -> int | None:
        try:
            return self._worker()
        except OSError:
            return None  # between two of them

    # ---- the record -------------------------------------------------------------------------------------------------

    def _tell(self, *words: str) -> None:
        done = subprocess.run([*self._ctrl, *words], env=self._environ, capture_output=True, text=True, check=False)
        output = done.stdout.splitlines() + [line for line in done.stderr.splitlines() if "error:" in line]
        self._note(f"hegm-ctrl {' '.join(words)}", [done.returncode, *output])

    def _post(self, path: str, body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            reply = [answer.status, answer.getheader("Content-Type"), json.loads(answer.read())]
        finally:
            connection.close()
        self._note(f"POST {path} {json.dumps(body)}", reply)

    def _files(self) -> list[str]:
        folder = self._folder / "checkpoint"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def _note(self, what: str, found: Any) -> None:
        text = json.dumps([what, found])
        names = {str(self._process.pid): "LAUNCHER"}
        registered = self._registered()
        self._known_worker = self._known_worker if registered is None else str(registered)
        names[self._known_worker] = "WORKER"
        for number, name in sorted(names.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(number, name)
        self.record.append(json.loads(text))


def steps(programs: Sequence[str], environ: dict[str, str], *, hasty: bool = False) -> Steps:
    """`hegm-launcher` and `hegm-ctrl`, as they are named, with all that they have answered.

    Hasty, one more checkpoint is asked for before the training has come back to where it was.
    """
    with tempfile.TemporaryDirectory(prefix="hegm-steps-") as folder:
        made = Steps(programs, Path(folder), environ, hasty=hasty)
        made.run()
    return made


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = steps([str(place / "hegm-launcher"), str(place / "hegm-ctrl")], dict(os.environ))
    sys.stdout.write(json.dumps(found.record, indent=1) + "\n")
