"""The witness's file: whatever happens while it is written, one whole content is in it."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from residency.journal.slots import SlotFile, read_slots, write_slot

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
    for cut in range(0, size, 311):
        path.write_bytes(after[:cut] + before[cut:])
        assert content(path) in (b'"two"', b'"three"')
        write_slot(path, b'"four"')
        assert content(path) == b'"four"'


def images(path: Path) -> tuple[bytes, bytes]:
    """The file before and after a change in place; what of the slot that is written over differs."""
    for text in (b'"one"', b'{"two":"%s"}' % (b"2" * 900)):
        write_slot(path, text)
    before = path.read_bytes()
    write_slot(path, b'{"three":"%s"}' % (b"3" * 1500))
    return before, path.read_bytes()


def newest(there: bytes) -> bytes | None:
    slot, _ = read_slots(there)
    return None if slot is None else bytes(slot.content)


def test_a_slot_torn_at_any_byte_leaves_the_one_before_or_is_whole(path: Path) -> None:
    before, after = images(path)
    size = len(after) // 2
    end = max(index for index in range(size) if before[index] != after[index]) + 1
    for cut in range(size + 1):
        # A beginning of the new one over the old one; its end alone; and nothing but zeros where it stops.
        for there in (
            after[:cut] + before[cut:],
            before[:cut] + after[cut:],
            after[:cut] + bytes(size - cut) + before[size:],
        ):
            is_whole = there[:size] == after[:size] or (there[: end - 1] == after[: end - 1] and b"}" in there[:end])
            assert newest(there) in ((newest(after), newest(before)) if is_whole else (newest(before),)), cut


def test_sectors_of_a_slot_that_arrive_in_any_order_leave_the_one_before_or_are_all_there(path: Path) -> None:
    before, after = images(path)
    sectors = [range(start, start + 512) for start in range(0, len(after) // 2, 512)]
    for chosen in range(2 ** len(sectors)):
        there = bytearray(before)
        for number, sector in enumerate(sectors):
            if chosen >> number & 1:
                there[sector.start : sector.stop] = after[sector.start : sector.stop]
        assert newest(bytes(there)) == newest(after if there == after else before), chosen


def test_a_flipped_bit_anywhere_is_never_taken_for_another_content(path: Path) -> None:
    before, after = images(path)
    for index in range(len(after)):
        there = bytearray(after)
        there[index] ^= 1 << index % 8
        assert newest(bytes(there)) in (newest(after), newest(before)), index


def test_a_file_that_is_kept_open_goes_on_with_what_others_made_of_it(path: Path) -> None:
    seen: list[bytes] = []

    def becomes(text: bytes) -> None:
        file.change(lambda there: seen.append(there) or text)  # type: ignore[func-returns-value]
        assert content(path) == text

    file = SlotFile(path)
    for number in range(4):
        becomes(b"%d" % number)
    # Another process in turn, twice in a row, and one that made the file anew, because it was too small.
    write_slot(path, b'"other"')
    becomes(b"4")
    write_slot(path, b'"x"')
    write_slot(path, b'"y"')
    becomes(b"5")
    write_slot(path, b'"%s"' % (b"z" * 9000))
    becomes(b"6")
    torn = bytearray(path.read_bytes())
    torn[10] = 0  # in the older slot, which is written next
    path.write_bytes(torn)
    becomes(b"7")
    path.unlink()
    becomes(b"8")
    path.rename(path.with_name("aside"))
    becomes(b"9")
    file.close()
    becomes(b"10")
    file.close()
    large = b'"%s"' % (b"z" * 9000)
    expected = [b"", b"0", b"1", b"2", b'"other"', b'"y"', large, b"6", b"", b"", b"9"]
    assert seen == expected
    assert content(path.with_name("aside")) == b"8"


def test_after_a_write_that_failed_the_file_is_looked_at_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SlotFile(path)
    for text in (b"1", b"2"):
        file.change(lambda _, text=text: text)  # type: ignore[misc]
    before = path.read_bytes()

    def fails(_descriptor: int) -> None:
        raise OSError(errno.EIO, "it failed")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="it failed"):
        patched.setattr(os, "fdatasync", fails)
        file.change(lambda _: b"3")
    # What became of it is not known: here the disk had kept nothing of it.
    path.write_bytes(before)
    seen: list[bytes] = []
    file.change(lambda there: seen.append(there) or b"4")  # type: ignore[func-returns-value]
    file.close()
    assert (seen, content(path)) == ([b"2"], b"4")


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
