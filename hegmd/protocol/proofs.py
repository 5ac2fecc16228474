"""Records and requests of the proof that jobs with communicators can be migrated: a throwaway job tries it.

Other code imports these names from `messages`, which gathers all messages.
"""

from __future__ import annotations

from .record import Record, field
from .requests import Request

PROVEN, FAILED, UNPROVEN = "proven", "failed", "unproven"


class Combination(Record):
    """The versions and hardware that decide whether ranks with communicators can be migrated. A proof holds for an
    equal one.
    """

    driver: str = field("version of the kernel driver, or the vendor")
    library: str = field("version of NCCL, or the names of other backends")
    framework_version: str = field("version of PyTorch")
    chip: str = field("identity of the GPUs' chips")
    links: str = field("nvlink, pcie, simulated, or several; `none` for one GPU")


class Proof(Record):
    """The result of a throwaway job with one combination."""

    combination: Combination = field("the combination that was tried")
    verdict: str = field("proven, failed or unproven")
    detail: str = field("failed: the step that failed, and why", default="")
    proved_utc: float | None = field("when it was tried", default=None)


class BeginProof(Request, op="nccl.begin-proof", reply=Proof, changes_state=True):
    """Return the combination of a throwaway job, and allow migrations of that job until a verdict is set or the job
    ends.
    """

    pid: int = field("a rank of the job")


class EndProof(Request, op="nccl.end-proof", reply=Proof, changes_state=True):
    """Store the verdict. From then on plans of jobs with this combination state it, or are refused."""

    proof: Proof = field("the verdict")
