"""What is said of a combination of driver, NCCL, PyTorch, chip and links that a throwaway job has tried.

Everybody else reads these from `messages`, which gathers every message there is.
"""

from __future__ import annotations

from .record import Record, field
from .requests import Request

PROVEN, FAILED, UNPROVEN = "proven", "failed", "unproven"


class Combination(Record):
    """What decides whether ranks with communicators can be moved: a proof holds for an equal one."""

    driver: str = field("version of the GPUs' kernel driver, or the vendor where it has none")
    library: str = field("version of NCCL; the names of the backends where none is used")
    framework_version: str = field("version of PyTorch")
    chip: str = field("identity of the GPUs' chips")
    links: str = field("what links the GPUs of the job: nvlink, pcie, simulated, or several; `none` for one GPU")


class Proof(Record):
    """What came of a throwaway job with one combination."""

    combination: Combination = field("what was tried")
    verdict: str = field("proven, failed or unproven")
    detail: str = field("failed: the step and what went wrong", default="")
    proved_utc: float | None = field("when it was found out, in seconds since 1970", default=None)


class BeginProof(Request, op="nccl.begin-proof", reply=Proof, changes_state=True):
    """Name the combination of a throwaway job, and allow moves of that job until there is a verdict, or it ends."""

    pid: int = field("a rank of the job")


class EndProof(Request, op="nccl.end-proof", reply=Proof, changes_state=True):
    """Keep what came of the job. From then on plans of such jobs say so, or refuse them."""

    proof: Proof = field("the verdict")
