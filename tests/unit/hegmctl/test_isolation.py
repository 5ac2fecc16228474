"""Words and environments that keep the agent out of a Python, and those that only look like it."""

from __future__ import annotations

from pathlib import Path

from hegmctl.isolation import leads_to_agent, leaves_out
from tests.cells import in_one_test


@in_one_test(
    ("command", "word"),
    [
        ("python3 -I t.py", "-I"),
        ("/opt/bin/python3.12 -uE t.py", "-E"),
        ("python -W ignore -X dev -sS t.py", "-S"),
        ("python --check-hash-based-pycs always -I t.py", "-I"),
        ("env -i python3 t.py", "env -i"),
        ("/usr/bin/env - python3 t.py", "env -"),
        ("env -u PYTHONPATH python3 t.py", "env -u PYTHONPATH"),
        ("env -uPYTHONPATH python3 t.py", "env -uPYTHONPATH"),
        ("env --unset=PYTHONPATH python3 t.py", "env --unset=PYTHONPATH"),
        ("env PYTHONPATH=/mine python3 t.py", "env PYTHONPATH=/mine"),
        ("env A=1 -u HOME python3 -E t.py", "-E"),
        ("python3 t.py -I", None),
        ("python3 -m trainer -E", None),
        ("python3 -msite -I", None),
        ("python3 -c pass -S", None),
        ("python3 -WI -XI t.py", None),
        ("python3 -W I -B -s -P t.py", None),
        ("python3 - -I", None),
        ("env A=-i -u HOME -C -i python3 t.py", None),
        ("env PYTHONPATH=/opt/hegmd/agent/inject:/mine python3 t.py", None),
        ("torchrun -I t.py", None),
        ("env", None),
    ],
)
def test_an_option_that_excludes_the_agent_is_found(command: str, word: str | None) -> None:
    assert leaves_out(command.split()) == word


def test_another_sitecustomize_before_the_agents_keeps_it_out(tmp_path: Path) -> None:
    inject = "/opt/hegmd/agent/inject"
    assert leads_to_agent({"PYTHONPATH": f"{tmp_path}:{inject}"})
    (tmp_path / "sitecustomize.py").touch()
    assert not leads_to_agent({"PYTHONPATH": f"{tmp_path}:{inject}"})
    assert leads_to_agent({"PYTHONPATH": f"{inject}/:{tmp_path}"})
    assert not leads_to_agent({})
