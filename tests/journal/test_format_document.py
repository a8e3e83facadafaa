"""The description of the format is exact: the verifier in it agrees with ours, on journals of every kind."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from residency.journal import schema, slots
from residency.journal.events import Draft, EventType
from residency.journal.lines import FORMAT_NAME, VERSION
from residency.journal.prune import DEFAULT
from residency.journal.retention import FINGERPRINTS_KEPT
from residency.journal.store import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = Path(__file__).parents[2] / "docs" / "journal-format.md"
GOLDEN = Path(__file__).parents[1] / "journals" / "v1"


@pytest.fixture(scope="module")
def text() -> str:
    return DOCUMENT.read_text("utf-8")


@pytest.fixture(scope="module")
def verifier(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    file = tmp_path_factory.mktemp("verifier") / "verifier.py"
    file.write_text(code)
    return file


def told(verifier: Path, journal: Path) -> list[str]:
    """In a process of its own: with the SQLite of the standard library, which must not meet ours on one file."""
    ended = subprocess.run([sys.executable, verifier, journal], capture_output=True, text=True, check=False)
    assert not ended.stderr and ended.returncode in (0, 1), ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture
def golden(path: Path) -> Path:
    """A journal with every type of event, pruned in one stream."""
    path.write_bytes(gzip.decompress((GOLDEN / "journal.db.gz").read_bytes()))
    shutil.copy(GOLDEN / "journal.db.head", path.with_name("journal.db.head"))
    return path


def test_the_verifier_finds_nothing_wrong_with_a_journal_that_is_whole(verifier: Path, golden: Path) -> None:
    assert told(verifier, golden) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("UPDATE events SET pid = pid + 1 WHERE position = 20", "event 20: it is not what was written"),
        ("DELETE FROM events WHERE position = 20", "what is missing is not what was pruned"),
        ("DELETE FROM events WHERE position = (SELECT max(position) FROM events)", "positions are missing"),
        ("UPDATE blobs SET content = x'00'", "it is damaged"),
        ("DELETE FROM events WHERE stream = 'committed'", "the witness saw another event"),
        ("UPDATE events SET previous_hash = zeroblob(32) WHERE position = 20", "does not follow the one before it"),
    ],
)
def test_the_verifier_finds_what_ours_finds(
    change: str,
    expected: str,
    verifier: Path,
    golden: Path,
    tamper: Callable[..., None],
    findings: Callable[..., object],
) -> None:
    tamper(change)
    assert any(expected in line for line in told(verifier, golden))
    assert findings()


def test_the_document_names_every_type_of_event_and_every_column(text: str) -> None:
    assert [kind.value for kind in EventType if f"`{kind.value}`" not in text] == []
    assert [name for name in schema.EVENT_COLUMNS if f"`{name}`" not in text] == []
    assert [name for table in schema.TABLES for name in [table] if f"**{table}**" not in text] == []


def test_the_numbers_in_the_document_are_the_programs(
    text: str, path: Path, drafts: Callable[[int], list[Draft]]
) -> None:
    assert f"0x{schema.APPLICATION_ID:08X}" in text
    assert text.startswith(f"# The journal's format\n\nFormat {schema.FORMAT}.")
    assert f"one of the last {DEFAULT.epochs}, or if its last event is younger than {DEFAULT.days} days" in text
    assert FINGERPRINTS_KEPT == 16 and "for the sixteen used last" in text
    assert f"`{FORMAT_NAME}`, `version`: {VERSION}" in text
    with Journal.open(path) as journal:
        journal.append(drafts(1), stream="worker", epoch="e", witness=True)
    content = path.with_name("journal.db.head").read_bytes()
    assert slots.read_slots(content)[0] is not None and len(content) == 2 * 4096
