"""Copies a journal that may be in use to another file, whole as it was at one moment, and checks the copy."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from residency.errors import JournalCorrupt, JournalError
from residency.journal.files import make_folder, sync_folder
from residency.journal.head import Head, HeadUnreadable, read_head, write_head
from residency.journal.header import unusable
from residency.journal.location import SQLITE_SUFFIXES, beside, head_path, is_server, journal_path, shown_location
from residency.journal.reader import JournalReader
from residency.journal.sqlite import FAILURES, connect, explain
from residency.journal.verify import verify

# A journal of a million events takes seconds; a disk that needs longer than this for one is not a disk to wait for.
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A copy that was made and found whole. has_witness: whether the journal's head witness was there to be copied."""

    path: str
    num_bytes: int
    last_position: int
    has_witness: bool


def backup(
    source_url: str | os.PathLike[str], target_path: str | os.PathLike[str], *, limit_s: float = LIMIT_S
) -> Backup:
    """Copy a journal, and its head witness, to a file that does not exist yet. Blocks; holds up no writer.

    The copy is a journal of its own, without a WAL, readable by this user only: every event that was acknowledged when
    the copy began is in it. It gets its name only when it is on disk and verified; a crash leaves at most a file with
    `.partial-` in its name.

    Raises:
        JournalCorrupt: the journal is damaged, or the copy of it has findings; there is no copy then.
        JournalError: there is something by that name already, the disk is full, it took longer than limit_s seconds, or
            the journal is on a server.
    """
    if is_server(source_url):
        raise JournalError(
            journal=shown_location(source_url),
            problem="is on a server, and a copy of it is the server's to make",
            remedy="use pg_dump -n and the name of its schema, or 'residency export' for JSON Lines that make a file",
        )
    source = journal_path(source_url)
    target = Path(os.path.realpath(os.path.expanduser(target_path)))
    for suffix in ("", ".head", *SQLITE_SUFFIXES):
        if os.path.lexists(beside(target, suffix)):
            raise _exists(beside(target, suffix))
    with JournalReader.open(source) as reader:
        # The witness first: it may lag the copy, never lead it.
        head = _head_of(reader.path)
        make_folder(target.parent)
        partial = beside(target, f".partial-{uuid.uuid4().hex[:8]}")
        try:
            _copy(reader, partial, name=str(target), limit_s=limit_s)
            if head is not None:
                write_head(partial, head)
            made = _checked(partial, target, head, source=reader.path)
            _name(partial, target, has_witness=head is not None)
        except FAILURES as error:
            raise explain(error, journal=target) from error
        except OSError as error:
            raise unusable(target, error) from error
        finally:
            for suffix in ("", ".head", *SQLITE_SUFFIXES):
                with contextlib.suppress(OSError):
                    beside(partial, suffix).unlink()
    return made


def _head_of(path: Path) -> Head | None:
    try:
        return read_head(path)
    except HeadUnreadable as error:
        raise JournalCorrupt(
            journal=str(path), problem=f"its head witness cannot be read ({error})", remedy="see 'residency verify'"
        ) from error


def _copy(reader: JournalReader, partial: Path, *, name: str, limit_s: float) -> None:
    os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = connect(partial, mode="rw", wait_s=limit_s)
    try:
        # It is put on disk once, as a whole.
        connection.execute("PRAGMA synchronous = OFF")
        reader.copy_into(connection, name=name, limit_s=limit_s)
    finally:
        connection.close()
    descriptor = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked(partial: Path, target: Path, head: Head | None, *, source: Path) -> Backup:
    with JournalReader.open(partial) as copied:
        serious = [finding for finding in verify(copied) if not finding.is_note]
        if serious:
            raise JournalCorrupt(
                journal=str(source),
                problem=f"its copy has {len(serious)} findings, the first: {serious[0].text}",
                remedy="see 'residency verify'; to keep it as evidence, stop its workers and copy the files",
            )
        return Backup(
            path=str(target),
            num_bytes=partial.stat().st_size,
            last_position=copied.last_position(),
            has_witness=head is not None,
        )


def _name(partial: Path, target: Path, *, has_witness: bool) -> None:
    """Give the copy its name, unless somebody took it meanwhile. The witness first: without a journal it is nothing."""
    if has_witness:
        _link(head_path(partial), head_path(target))
    _link(partial, target)
    sync_folder(target.parent)


def _link(made: Path, name: Path) -> None:
    try:
        os.link(made, name)
    except FileExistsError as error:
        raise _exists(name) from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without links. The name is taken first, so that what is replaced is our own empty file.
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError as taken:
            raise _exists(name) from taken
        os.replace(made, name)


def _exists(path: Path) -> JournalError:
    return JournalError(journal=str(path), problem="is there already", remedy="name another file; this one is left")
