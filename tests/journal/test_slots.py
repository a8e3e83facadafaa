"""The witness's file: whatever happens while it is written, one whole content is in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from residency.journal.slots import read_slots, write_slot

if TYPE_CHECKING:
    from pathlib import Path


def content(path: Path) -> bytes | None:
    slot, _ = read_slots(path.read_bytes())
    return None if slot is None else bytes(slot.content)


def test_the_last_content_is_read_and_the_file_stays_the_same_one(path: Path) -> None:
    write_slot(path, b'"first"')
    inode, size = path.stat().st_ino, path.stat().st_size
    for number in range(5):
        write_slot(path, b'{"number":%d}' % number)
        assert content(path) == b'{"number":%d}' % number
    assert (path.stat().st_ino, path.stat().st_size) == (inode, size)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_content_that_outgrows_its_slot_gets_a_larger_file(path: Path) -> None:
    write_slot(path, b'"small"')
    large = b'"' + b"x" * 10_000 + b'"'
    write_slot(path, large)
    assert content(path) == large
    assert path.stat().st_size == 2 * 32_768
    write_slot(path, b'"small"')
    assert content(path) == b'"small"'


def test_a_write_that_was_cut_off_leaves_the_content_before_it(path: Path) -> None:
    write_slot(path, b'"one"')
    write_slot(path, b'"two"')
    before = path.read_bytes()
    write_slot(path, b'"three"')
    after = path.read_bytes()
    size = len(after) // 2
    changed = [index for index in range(len(after)) if before[index] != after[index]]
    assert max(changed) < size, "only the older slot is written over"
    for cut in range(0, size, 7):
        path.write_bytes(after[:cut] + before[cut:])
        assert content(path) in (b'"two"', b'"three"')
        write_slot(path, b'"four"')
        assert content(path) == b'"four"'


@pytest.mark.parametrize("there", [b"", b"{", b"x" * 8192, b'{"journal_id":"a"}', b" " * 8192, b"\xff" * 4096])
def test_what_is_no_such_file_is_written_over(there: bytes, path: Path) -> None:
    path.write_bytes(there)
    assert content(path) is None
    write_slot(path, b'"content"')
    assert content(path) == b'"content"'


def test_a_pipe_does_not_make_a_writer_wait(path: Path) -> None:
    os.mkfifo(path)
    write_slot(path, b'"content"')
    assert content(path) == b'"content"'


def test_a_link_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    path.symlink_to(target)
    write_slot(path, b'"content"')
    assert content(path) == b'"content"' and not path.is_symlink()
    assert target.read_text() == "mine"


def test_a_folder_of_that_name_is_an_error_and_leaves_nothing(path: Path) -> None:
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_slot(path, b'"content"')
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
