"""The journal's file: how it is made in one step, and how a damaged one is set aside with all that belongs to it."""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from residency.journal.engine import create_tables, make_engine, use_wal
from residency.journal.head import CONTRADICTED
from residency.journal.header import unusable
from residency.journal.location import SQLITE_SUFFIXES, beside, head_path
from residency.journal.meta import new_meta

if TYPE_CHECKING:
    from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make the folder and its missing parents, for this user only, so that they survive a power loss.

    Raises:
        JournalError: it cannot be made, or something else has its name.
    """
    try:
        if folder.is_dir():
            return
        if folder.parent != folder:
            make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        sync_folder(folder.parent)
        os.listdir(folder)  # something that is no folder may have had its name
    except OSError as error:
        raise unusable(folder, error) from error


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk. Blocks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_journal(path: Path, *, created_at_ns: int, wait_s: float) -> None:
    """Make an empty journal at the path, readable by this user only.

    It is made under another name and renamed, so that a crash leaves either none or a whole one.

    Raises:
        OSError, sqlalchemy.exc.DBAPIError: the folder cannot be written, or the disk is full.
    """
    temporary = beside(path, ".new")
    _remove_all(temporary)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    engine = make_engine(temporary, wait_s=wait_s)
    try:
        with engine.connect() as connection:
            create_tables(connection, new_meta(created_at_ns=created_at_ns))
            use_wal(connection, path)
        engine.dispose()
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        engine.dispose()
        _remove_all(temporary)
        raise


def set_aside(path: Path, *, why: str, now_ns: int) -> Path | None:
    """Rename the journal, its WAL and its head witness to `<name>.<why>-<UTC time>`; nothing is removed.

    Returns the new name; None if nothing was there.

    Raises:
        OSError: the folder cannot be written.
    """
    base = _free_name(path, why, now_ns)
    moved = False
    # The database last: until then, a crash leaves it where the next start finds it.
    for suffix in (*SQLITE_SUFFIXES, ".head", ""):
        source = beside(path, suffix) if suffix else path
        if source.exists():
            os.rename(source, base.with_name(base.name + suffix))
            moved = True
    if not moved:
        return None
    sync_folder(path.parent)
    return base


def set_head_aside(path: Path, *, now_ns: int) -> Path:
    """Rename a head witness that contradicts the journal, so that the contradiction stays provable. Returns its name.

    A WAL is copied beside it: what the journal lost may still be in there, and the next close removes it.
    """
    head, wal = head_path(path), beside(path, "-wal")
    kept = _free_name(head, CONTRADICTED, now_ns)
    if wal.exists():
        shutil.copyfile(wal, beside(kept, "-wal"))
    os.rename(head, kept)
    return kept


def _free_name(path: Path, why: str, now_ns: int) -> Path:
    stamp = datetime.fromtimestamp(now_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = beside(path, f".{why}-{stamp}")
    number = 1
    while any(os.path.lexists(name.with_name(name.name + suffix)) for suffix in ("", *SQLITE_SUFFIXES, ".head")):
        number += 1
        name = beside(path, f".{why}-{stamp}-{number}")
    return name


def _remove_all(path: Path) -> None:
    for suffix in ("", *SQLITE_SUFFIXES):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.with_name(path.name + suffix))
