"""Control groups of real nodes, and the owner of a process that they show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hegmd.node.workloads import workload_of
from hegmd.protocol.snapshots import Workload
from tests.cells import in_one_test

ID = "679f3691f7f1b20198548be43b86f265f9fff9be0ac4c973638f5ee89decbca9"
OTHER_ID = "d4e8e05a546c86b6443f101966c618e47753ed01fa9929cae00d3b692f7a9f80"
POD = "214f3ba8-4b69-4bdb-a7d5-5ecc73f04ae9"
POD_ = POD.replace("-", "_")

KIND_SLICES = f"kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{POD_}.slice"

KUBERNETES = {
    "cgroupfs driver, v1, docker": (
        f"12:memory:/kubepods/burstable/pod{POD}/{ID}\n1:name=systemd:/kubepods/burstable/pod{POD}/{ID}\n",
        {"qos": "burstable", "container": ID},
    ),
    "cgroupfs driver, v1, guaranteed": (f"4:memory:/kubepods/pod{POD}/{ID}\n", {"qos": "guaranteed", "container": ID}),
    "systemd driver, v2, containerd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope\n",
        {"qos": "burstable", "container": ID, "runtime": "containerd"},
    ),
    "systemd driver, v2, cri-o, with a group below the container": (
        f"0::/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ID}.scope/container\n",
        {"qos": "guaranteed", "container": ID, "runtime": "cri-o"},
    ),
    "systemd driver, v1, docker": (
        f"9:devices:/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD_}.slice/docker-{ID}.scope\n",
        {"qos": "besteffort", "container": ID, "runtime": "docker"},
    ),
    "containerd that was not told of the systemd driver": (
        f"9:memory:/system.slice/containerd.service/kubepods-besteffort-pod{POD_}.slice:cri-containerd:{ID}\n",
        {"qos": "besteffort", "container": ID, "runtime": "containerd"},
    ),
    "a cluster in a container": (
        f"0::/system.slice/docker-{OTHER_ID}.scope/kubelet.slice/{KIND_SLICES}/cri-containerd-{ID}.scope\n",
        {"qos": "besteffort", "container": ID, "runtime": "containerd"},
    ),
    "seen from another group namespace": (f"0::/../../pod{POD}/{ID}\n", {"container": ID}),
    "the pod's sandbox itself": (f"0::/kubepods/besteffort/pod{POD}\n", {"qos": "besteffort"}),
}

OTHERS = {
    "slurm v1": (
        "11:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0\n1:name=systemd:/system.slice/slurmd.service\n",
        Workload(kind="slurm", id="280678", detail={"step": "interactive", "task": "0"}),
    ),
    "slurm v1, several slurmd": (
        "4:memory:/slurm_node01/uid_1000/job_12/step_batch\n",
        Workload(kind="slurm", id="12", detail={"step": "batch"}),
    ),
    "slurm v2": (
        "0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0\n",
        Workload(kind="slurm", id="1392969", detail={"step": "0", "task": "0"}),
    ),
    "slurm v2, node name in front": (
        "0::/system.slice/node1_slurmstepd.scope/job_8/step_batch/user/task_special\n",
        Workload(kind="slurm", id="8", detail={"step": "batch", "task": "special"}),
    ),
    "slurm, the step's own keeper": (
        "0::/system.slice/slurmstepd.scope/job_8/step_extern/slurm\n",
        Workload(kind="slurm", id="8", detail={"step": "extern"}),
    ),
    "podman in a slurm job": (
        f"0::/system.slice/slurmstepd.scope/job_8/step_0/user/task_0/libpod-{ID}\n",
        Workload(kind="slurm", id="8", detail={"step": "0", "task": "0", "container": ID, "runtime": "podman"}),
    ),
    "slurm daemon without a job": (
        "0::/system.slice/slurmstepd.scope/system\n",
        Workload(kind="systemd", id="slurmstepd.scope", detail={"slice": "system.slice"}),
    ),
    "docker, cgroupfs, v1": (
        f"12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n",
        Workload(kind="container", id=ID, detail={"runtime": "docker"}),
    ),
    "docker, systemd, v2": (
        f"0::/system.slice/docker-{ID}.scope\n",
        Workload(kind="container", id=ID, detail={"runtime": "docker"}),
    ),
    "docker, rootless": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope\n",
        Workload(kind="container", id=ID, detail={"runtime": "docker"}),
    ),
    "docker in docker": (
        f"0::/docker/{ID}/docker/{OTHER_ID}\n",
        Workload(kind="container", id=ID, detail={"runtime": "docker"}),
    ),
    "docker in lxc": (
        f"0::/lxc.payload.build/docker/{ID}\n",
        Workload(kind="container", id="build", detail={"runtime": "lxc"}),
    ),
    "podman, root": (
        f"0::/machine.slice/libpod-{ID}.scope/container\n",
        Workload(kind="container", id=ID, detail={"runtime": "podman"}),
    ),
    "podman, rootless": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope\n",
        Workload(kind="container", id=ID, detail={"runtime": "podman"}),
    ),
    "podman, cgroupfs": (
        f"5:devices:/libpod_parent/libpod-{ID}\n",
        Workload(kind="container", id=ID, detail={"runtime": "podman"}),
    ),
    "podman's monitor is not the container": (
        f"0::/machine.slice/libpod-conmon-{ID}.scope\n",
        Workload(kind="systemd", id=f"libpod-conmon-{ID}.scope", detail={"slice": "machine.slice"}),
    ),
    "podman's own pods are not Kubernetes'": (
        f"0::/machine.slice/machine-libpod_pod_{OTHER_ID}.slice/libpod-{ID}.scope\n",
        Workload(kind="container", id=ID, detail={"runtime": "podman"}),
    ),
    "nerdctl": (
        f"0::/system.slice/nerdctl-{ID}.scope\n",
        Workload(kind="container", id=ID, detail={"runtime": "containerd"}),
    ),
    "containerd's default namespace": (f"0::/default/{ID}\n", Workload(kind="container", id=ID)),
    "lxc, v2": ("0::/lxc.payload.c1/init.scope\n", Workload(kind="container", id="c1", detail={"runtime": "lxc"})),
    "lxc, old": ("2:cpu:/lxc/101/ns\n", Workload(kind="container", id="101", detail={"runtime": "lxc"})),
    "nspawn": (
        "0::/machine.slice/machine-gpu\\x2dtest.scope/payload\n",
        Workload(kind="container", id="gpu-test", detail={"runtime": "nspawn"}),
    ),
    "a virtual machine is not a container": (
        "0::/machine.slice/machine-qemu\\x2d1\\x2dvm.scope/libvirt/emulator\n",
        Workload(kind="systemd", id="machine-qemu\\x2d1\\x2dvm.scope", detail={"slice": "machine.slice"}),
    ),
    "service": (
        "0::/system.slice/jupyterhub.service\n",
        Workload(kind="systemd", id="jupyterhub.service", detail={"slice": "system.slice"}),
    ),
    "service, hybrid": (
        "13:pids:/system.slice/train.service\n1:name=systemd:/system.slice/train.service\n0::/system.slice/train.service\n",
        Workload(kind="systemd", id="train.service", detail={"slice": "system.slice"}),
    ),
    "login session": (
        "0::/user.slice/user-1000.slice/session-42.scope\n",
        Workload(
            kind="systemd", id="session-42.scope", detail={"slice": "user-1000.slice", "user": "1000", "session": "42"}
        ),
    ),
    "a user's own unit": (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/train@7.service\n",
        Workload(
            kind="systemd", id="train@7.service", detail={"slice": "app.slice", "user": "1000", "manager": "user"}
        ),
    ),
    "a group that its owner removed": (
        "0::/system.slice/train.service (deleted)\n",
        Workload(kind="systemd", id="train.service", detail={"slice": "system.slice"}),
    ),
    "only a slice": ("0::/user.slice\n", Workload(kind="systemd", id="user.slice")),
}


@in_one_test(("text", "detail"), KUBERNETES.values(), ids=KUBERNETES.keys())
def test_pods(text: str, detail: dict[str, str]) -> None:
    assert workload_of(text) == Workload(kind="kubernetes", id=POD, detail=detail)


@in_one_test(("text", "expected"), OTHERS.values(), ids=OTHERS.keys())
def test_everything_but_pods(text: str, expected: Workload) -> None:
    assert workload_of(text) == expected


def test_static_pod_has_the_kubelets_hash_for_a_uid() -> None:
    found = workload_of(
        f"0::/kubepods.slice/kubepods-podd2c0d1f0d7a1b3c4d5e6f708192a3b4c.slice/cri-containerd-{ID}.scope\n"
    )
    assert found is not None
    assert (found.kind, found.id) == ("kubernetes", "d2c0d1f0d7a1b3c4d5e6f708192a3b4c")


@in_one_test("text", ["", "0::/\n", "4:memory:/\n1:name=systemd:/\n", "nonsense", "0::", ":::", "0::/batch/7\n"])
def test_no_owner(text: str) -> None:
    assert workload_of(text) is None


@given(st.text(alphabet=st.sampled_from("0:/-_.podslicejb123\\x2d\n"), max_size=200))
def test_any_text_gives_an_answer(text: str) -> None:
    found = workload_of(text)
    assert found is None or Workload.from_plain(found.to_plain(), "workload") == found
