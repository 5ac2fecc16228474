"""A shared library stays loaded while its file is the same one, and is loaded again when it is not.

Over libraries that tell which one they are, and how often they were asked: a count that continues is the same image.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hegmd.node.devices.shared_library import SharedLibrary
from tests.patience import HANG_S
from tests.stubs.build import COMPILER

REPOSITORY = Path(__file__).resolve().parents[4]
NAME = "libhegm-tiny.so.1"

# Builds the library that says that number, at that path.
Build = Callable[[Path, int], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("tiny")

    def build(target: Path, number: int) -> Path:
        built = folder / f"{number}.so"
        if not built.exists():
            source = folder / f"{number}.c"
            source.write_text(
                f"static int calls; int number(void) {{ return {number}; }} int count(void) {{ return ++calls; }}"
            )
            subprocess.run([COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", built, source], check=True)
        fresh = target.with_name(target.name + ".new")
        fresh.write_bytes(built.read_bytes())
        fresh.replace(target)
        return target

    return build


def is_mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text()


def test_the_image_stays_while_the_file_is_the_same(tmp_path: Path, build: Build) -> None:
    library = SharedLibrary(str(build(tmp_path / NAME, 1)))
    assert [library.load().count() for _ in range(3)] == [1, 2, 3]
    library.unload()
    assert not is_mapped(tmp_path)


def test_unloading_twice_is_fine_and_loading_again_starts_fresh(tmp_path: Path, build: Build) -> None:
    library = SharedLibrary(str(build(tmp_path / NAME, 1)))
    assert library.load().count() == 1
    library.unload()
    library.unload()
    assert library.load().count() == 1
    library.unload()


def test_a_file_that_took_the_place_of_another_is_loaded(tmp_path: Path, build: Build) -> None:
    library = SharedLibrary(str(build(tmp_path / NAME, 1)))
    assert library.load().number() == 1
    build(tmp_path / NAME, 2)
    assert library.load().number() == 2
    library.unload()
    assert not is_mapped(tmp_path)


@pytest.mark.parametrize("old_stays", [True, False])
def test_links_are_followed_to_the_file(tmp_path: Path, build: Build, old_stays: bool) -> None:
    old, new = build(tmp_path / "tiny.so.1.1", 1), build(tmp_path / "tiny.so.1.2", 2)
    between, name = tmp_path / "tiny.so.current", tmp_path / NAME
    between.symlink_to(old)
    name.symlink_to(between)
    library = SharedLibrary(str(name))
    assert library.load().number() == 1
    between.unlink()
    between.symlink_to(new)
    if not old_stays:
        old.unlink()
    assert library.load().number() == 2
    library.unload()


def test_a_missing_file_is_an_error_until_it_exists_again(tmp_path: Path, build: Build) -> None:
    library = SharedLibrary(str(build(tmp_path / NAME, 1)))
    library.load()
    (tmp_path / NAME).unlink()
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            library.load()
        assert not is_mapped(tmp_path)
    build(tmp_path / NAME, 2)
    assert library.load().number() == 2
    library.unload()


def test_the_image_goes_with_the_object(tmp_path: Path, build: Build) -> None:
    library = SharedLibrary(str(build(tmp_path / NAME, 1)))
    image = library.load()
    assert is_mapped(tmp_path)
    del library
    assert not is_mapped(tmp_path)
    assert isinstance(image, ctypes.CDLL), "which whoever holds it must not call any more"


BY_NAME = f"""
import os, sys
from hegmd.node.devices.shared_library import SharedLibrary
library = SharedLibrary({NAME!r})
seen = [library.load().number(), library.load().count(), library.load().count()]
os.replace(sys.argv[1], sys.argv[2])
print(seen, library.load().number())
"""


def test_a_library_is_found_by_its_name_and_its_file_by_where_it_was_found(tmp_path: Path, build: Build) -> None:
    """The loader reads its search path at the start of a process only."""
    (tmp_path / "searched").mkdir()
    found = build(tmp_path / "searched" / NAME, 1)
    newer = build(tmp_path / "newer", 2)
    done = subprocess.run(
        [sys.executable, "-c", BY_NAME, newer, found],
        env={**os.environ, "LD_LIBRARY_PATH": str(found.parent), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    assert done.stdout == "[1, 1, 2] 2\n"
