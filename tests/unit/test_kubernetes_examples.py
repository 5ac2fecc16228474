"""The examples for Kubernetes: each field is one that Kubernetes knows, names lead somewhere, and commands parse.

The schemas are those of Kubernetes' own API, in the strict form that refuses fields which are not there; a cluster
would take some mistakes in silence.
"""

from __future__ import annotations

import copy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hegmcompat.surroundings import read_surroundings, require_token_off_loopback
from hegmctl.arguments import parse
from hegmd.__main__ import ARGUMENTS
from hegmd.config import load
from tests.cells import in_one_test

SHARES = {"production": 80, "normal": 50, "best-effort": 20}
FOLDER = Path(__file__).parents[2] / "contrib" / "kubernetes"
# The first that has resource.k8s.io/v1, and the newest that the schemas know.
VERSIONS = ("1.34", kubernetes_validate.latest_version())
FILES = sorted(FOLDER.glob("*.yaml"))


def _documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


DOCUMENTS = list(_documents())
NAMES = [f"{file}-{document['kind']}-{document['metadata']['name']}" for file, document in DOCUMENTS]


def found(kind: str) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document for _file, document in DOCUMENTS if document["kind"] == kind}


def pod_specs() -> dict[str, dict[str, Any]]:
    pods = {name: pod["spec"] for name, pod in found("Pod").items()}
    return pods | {name: made["spec"]["template"]["spec"] for name, made in found("DaemonSet").items()}


def containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [
        (f"{name}/{container['name']}", spec, container)
        for name, spec in pod_specs().items()
        for container in spec["containers"]
    ]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {
        variable["name"]: variable.get("value", "from-a-secret-of-the-cluster") for variable in container.get("env", ())
    }


@pytest.mark.thorough
@in_one_test("version", VERSIONS)
@in_one_test("document", [document for _file, document in DOCUMENTS], ids=NAMES)
def test_kubernetes_knows_every_field(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


PLANTED = {
    "a field that is misspelt": ("DaemonSet", "hegmd", ("spec", "template", "spec", "hostPid"), True),
    "a field at the wrong place": ("Pod", "train", ("spec", "runAsNonRoot"), True),
    "text in the place of a number": ("DaemonSet", "hegmd", ("spec", "template", "spec", "containers"), "hegmd"),
    "a number in the place of text": ("Pod", "train", ("spec", "restartPolicy"), 1),
    "a claim in its form before version 1": (
        "ResourceClaimTemplate",
        "one-gpu",
        ("spec", "spec", "devices", "requests"),
        [{"name": "gpu", "deviceClassName": "gpu.nvidia.com"}],
    ),
    "what has to be there and is not": ("DaemonSet", "hegmd", ("spec", "selector"), None),
}


@pytest.mark.thorough
@in_one_test("mistake", PLANTED)
def test_a_mistake_would_be_found(mistake: str) -> None:
    kind, name, path, value = PLANTED[mistake]
    document = copy.deepcopy(found(kind)[name])
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


@pytest.mark.thorough
@in_one_test(("name", "spec"), pod_specs().items(), ids=list(pod_specs()))
def test_everything_that_a_pod_names_exists(name: str, spec: dict[str, Any]) -> None:
    del name
    for claim in spec.get("resourceClaims", ()):
        if "resourceClaimName" in claim:
            assert claim["resourceClaimName"] in found("ResourceClaim")
        else:
            assert claim["resourceClaimTemplateName"] in found("ResourceClaimTemplate")
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for volume in volumes.values():
        if "configMap" in volume:
            assert volume["configMap"]["name"] in found("ConfigMap")
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in found("PersistentVolumeClaim")
    all_containers = [*spec.get("initContainers", ()), *spec["containers"]]
    mounted = {mount["name"] for container in all_containers for mount in container["volumeMounts"]}
    assert mounted == volumes.keys()
    claimed = {claim["name"] for container in spec["containers"] for claim in container["resources"].get("claims", ())}
    assert claimed == {claim["name"] for claim in spec.get("resourceClaims", ())}


@pytest.mark.thorough
@in_one_test(("name", "spec", "container"), containers(), ids=[name for name, *_ in containers()])
def test_every_command_is_one_of_ours_and_its_variables_are_known(
    name: str, spec: dict[str, Any], container: dict[str, Any]
) -> None:
    program, *words = container["command"]
    environ = environment(container)
    if program == "sh":
        assert words == ["/opt/hegm-scripts/two.sh"], "which is tested by itself"
        assert spec["securityContext"]["runAsNonRoot"], f"{name} would be root to hegmd"
    elif program == "hegm-launcher":
        surroundings = read_surroundings(environ)
        require_token_off_loopback(surroundings.host, surroundings.token)
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(surroundings.folder) in mounts
        assert Path(words[-1]).parent == Path("/workspace")
        assert spec["securityContext"]["runAsNonRoot"], f"{name} would be root to hegmd"
    elif program == "hegmctl":
        assert parse(words).text("priority") == spec["priorityClassName"]
        assert spec["securityContext"]["runAsNonRoot"], f"{name} would be root to hegmd"
    else:
        assert program == "hegmd"
        assert {word for word in words if word.startswith("--")} <= {argument.flag for argument in ARGUMENTS}
        assert container["securityContext"]["privileged"] is False
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            executable, *rest = container[probe]["exec"]["command"]
            assert executable == "hegmctl"
            parsed = parse(rest)
            assert parsed.row is not None
            limit_s = parsed.seconds("timeout")
            assert limit_s is not None
            assert limit_s < container[probe]["timeoutSeconds"]


@pytest.mark.thorough
def test_two_trainings_in_a_pod_have_a_port_each() -> None:
    ports = [read_surroundings(environment(pod_spec)).port for pod_spec in pod_specs()["train-two"]["containers"]]
    assert len(set(ports)) == len(ports) == 2


@pytest.mark.thorough
def test_an_urgent_pod_makes_room_on_its_own_gpu_with_the_priority_of_its_class() -> None:
    spec = pod_specs()["urgent"]
    (init,) = spec["initContainers"]
    shell, option, text = init["command"]
    assert (shell, option) == ("sh", "-c")
    program, *words = shlex.split(text.removeprefix("exec ").replace('"$(', "'$(").replace(')"', ")'"))
    assert program == "hegmctl"
    arguments = parse(words)
    assert arguments.row is not None
    assert arguments.row.name == "make-room"
    assert arguments.text("priority") == spec["priorityClassName"]
    assert arguments.request("room.make").to_plain()["hold_s"] == 120.0
    assert init["resources"] == spec["containers"][0]["resources"], "nvidia-smi shows the GPU of the claim"


@pytest.mark.thorough
def test_the_urgent_pod_and_its_training_were_kept_off_nodes_that_are_for_gpus_only() -> None:
    """Such nodes have a taint, which a claim does not tolerate by itself."""
    for name, spec in pod_specs().items():
        tolerated = {toleration.get("key", "any") for toleration in spec.get("tolerations", ())}
        assert tolerated & {"nvidia.com/gpu", "amd.com/gpu"}, name


@pytest.mark.thorough
def test_priority_classes_are_in_the_order_of_hegmds_priorities() -> None:
    values = {name: made["value"] for name, made in found("PriorityClass").items()}
    assert values == {name: SHARES[name] for name in values}
    assert {spec.get("priorityClassName") for spec in pod_specs().values()} >= set(values) == {"normal", "best-effort"}


@pytest.fixture
def in_one_container(tmp_path: Path) -> dict[str, str]:
    """Run the script of one container, with its folders here and a substitute for python3 that acts as a launcher."""
    init = pod_specs()["train-two-in-one"]["initContainers"][0]["command"]
    (tmp_path / "opt").mkdir()
    copying = init[2].replace("/opt/hegm", str(tmp_path / "opt"))
    subprocess.run([sys.executable, init[1], copying], check=True)
    script = found("ConfigMap")["hegm-scripts"]["data"]["two.sh"].replace("/opt/hegm", str(tmp_path / "opt"))
    (tmp_path / "two.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$CUDA_VISIBLE_DEVICES $HEGM_CTRL_PORT $PYTHONPATH $*" > {tmp_path}/started-$CUDA_VISIBLE_DEVICES\n'
        '[ "$CUDA_VISIBLE_DEVICES" = "$ENDS" ] && exit 3\nexit 0\n'
    )
    python.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "at": str(tmp_path)}


@pytest.mark.thorough
@pytest.mark.parametrize("ends", ["0", "1"])
def test_several_launchers_run_in_one_container(in_one_container: dict[str, str], ends: str) -> None:
    """Issue 14, row 7: HeGM's examples have two launchers in one container, and its code from a ConfigMap."""
    at = Path(in_one_container["at"])
    done = subprocess.run(["sh", at / "two.sh"], env={**in_one_container, "ENDS": ends}, check=False)
    assert done.returncode == 3, "the failure of either is the container's"
    for gpu, port in (("0", "8298"), ("1", "8299")):
        words = f"{gpu} {port} {at}/opt -m hegm.launcher python3 -u /workspace/train.py\n"
        assert (at / f"started-{gpu}").read_text() == words


@pytest.mark.thorough
def test_the_copied_files_of_the_image_run_alone(in_one_container: dict[str, str]) -> None:
    """Issue 14, row 7: the packages that the container gets suffice for a launcher."""
    copied = Path(in_one_container["at"]) / "opt"
    assert sorted(path.name for path in copied.iterdir()) == ["hegm", "hegmcompat", "hegmctl", "hegmd", "msgpack"]
    words = [sys.executable, "-S", "-m", "hegm.launcher", "/bin/sh", "-c", "exit 5"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(copied), "HEGM_CHECKPOINT_DIR": str(copied.parent / "left")}
    environ |= {"HEGM_CTRL_PORT": "0", "HEGM_SOCKET": str(copied.parent / "none")}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr


@pytest.mark.thorough
def test_the_restored_training_is_the_same_one_elsewhere() -> None:
    before, after = (pod_specs()[name]["containers"][0] for name in ("train", "train-restored"))
    assert after["command"] == before["command"]
    assert environment(after)["HEGM_CHECKPOINT_DIR"] == environment(before)["HEGM_CHECKPOINT_DIR"]
    claims = [pod_specs()[name]["resourceClaims"][0] for name in ("train", "train-restored")]
    assert claims[0]["resourceClaimTemplateName"] != claims[1]["resourceClaimTemplateName"]


@pytest.mark.thorough
def test_the_daemon_takes_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "hegmd.toml"
    path.write_text(found("ConfigMap")["hegmd"]["data"]["hegmd.toml"])
    config = load(path=str(path), environ={})
    assert config.daemon.socket_mode == 0o666


@pytest.mark.thorough
def test_the_training_is_python_and_knows_of_nothing() -> None:
    text = found("ConfigMap")["training-script"]["data"]["train.py"]
    compile(text, "train.py", "exec")
    assert "hegm" not in text.lower()


@pytest.mark.thorough
def test_the_readme_applies_existing_files() -> None:
    text = (FOLDER / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("$ kubectl")]
    applied = {word for line in lines for word in shlex.split(line[2:]) if word.endswith(".yaml")}
    assert applied <= {path.name for path in FILES}
    assert all(f"`{path.name}`" in text for path in FILES)
