"""The vectors that are shipped for other languages are what the code says today, and our own core agrees with them."""

import json
import re
import runpy
from pathlib import Path

from hegmd.protocol import codec
from hegmd.protocol.frames import FrameReader
from tests.cells import in_one_test

REPO = Path(__file__).parents[3]
VECTORS = REPO / "docs" / "protocol-vectors"


def test_the_files_are_fresh(tmp_path: Path) -> None:
    runpy.run_path(str(REPO / "tools" / "vectors.py"))["main"](tmp_path)
    for made in sorted(tmp_path.iterdir()):
        assert made.read_text() == (VECTORS / made.name).read_text(), f"{made.name} is stale: run `make docs`"


def test_the_reference_is_fresh() -> None:
    from tools.docs.reference import insert

    page = (REPO / "docs" / "protocol.md").read_text()
    assert insert(page) == page, "docs/protocol.md is stale: run `make docs`"


@in_one_test("vector", json.loads((VECTORS / "messages.json").read_text()), ids=lambda v: v["name"])
def test_messages_decode_to_their_envelope(vector: dict[str, str]) -> None:
    reader = FrameReader(100_000)
    reader.feed(bytes.fromhex(vector["frame"]))
    payload = reader.next_payload()
    assert payload is not None
    assert codec.decode(payload) == vector["envelope"]


def test_the_example_on_the_page_is_counted_right() -> None:
    """The page gave a length that does not fit the map below it, which misled authors of clients."""
    page = (REPO / "docs" / "protocol.md").read_text()
    length, first = re.findall(r"as bytes: length `(0x[0-9a-f]+)`.*?```\n(.*?)\n", page, re.DOTALL)[0]
    assert int(length, 16) == len(codec.encode(json.loads(first)))


def test_the_worked_migrate_has_fields_that_exist() -> None:
    page = (REPO / "docs" / "protocol.md").read_text()
    example = page.partition("## Example: a migrate")[2].partition("## Versions")[0]
    used = set(re.findall(r'"(\w+)": ', example)) - {"v", "id", "op", "args", "ok", "err", "event"}
    assert len(used) > 20
    assert used <= set(re.findall(r"(?m)^\* `(\w+)` ", page.partition("## Reference")[2]))
