"""What a power loss leaves: images of a folder, made from a recorded log of a writer's calls.

The model: bytes that a sync of their file covered stay. Of what was written since, any set of sectors of 512 bytes may
have arrived, whatever the order of the writes, and a change of a file's size may have or not. Names (made, renamed,
removed) are on disk once their folder was synced; of the later ones any beginning, or any set, may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.crash.shim import Record

SECTOR_BYTES = 512

# Of a file: where bytes were written, or None and its new size.
Change = tuple[int | None, bytes, int]


@dataclass(slots=True)
class _File:
    """One file, whatever its name. synced: what stays. since: what was done to it after that."""

    synced: bytearray = field(default_factory=bytearray)
    since: list[Change] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.since:
            _apply(self.synced, change)
        self.since.clear()

    def image(self, rng: random.Random) -> bytes:
        """Return one of the contents that it may have."""
        content = bytearray(self.synced)
        how = rng.choice(["nothing", "everything", "a beginning", "sectors", "sectors"])
        if how == "nothing":
            return bytes(content)
        kept = self.since
        if how == "a beginning":
            kept = kept[: rng.randrange(len(kept) + 1)]
        share = rng.choice([0.1, 0.5, 0.9]) if how == "sectors" else 1.0
        for change in kept:
            for sector in _sectors(change):
                if share == 1.0 or rng.random() < share:
                    _apply(content, sector)
        return bytes(content)


def _apply(content: bytearray, change: Change) -> None:
    at, data, size = change
    if at is None:
        content[size:] = b""
        content.extend(bytes(size - len(content)))
        return
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data)] = data


def _sectors(change: Change) -> list[Change]:
    at, data, _ = change
    if at is None:
        return [change]
    bounds = [at, *range((at // SECTOR_BYTES + 1) * SECTOR_BYTES, at + len(data), SECTOR_BYTES), at + len(data)]
    return [(first, data[first - at : last - at], 0) for first, last in pairwise(bounds)]


# A change of names: (what became of it, old name or none, new name or none, the file).
_Naming = tuple[str | None, str | None, _File | None]


class Disk:
    """A folder as the writer sees it, and as the disk has it."""

    def __init__(self, folder: Path) -> None:
        self._now: dict[str, _File] = {}
        for path in folder.iterdir():
            self._now[path.name] = _File(bytearray(path.read_bytes()))
        self._durable = dict(self._now)
        self._namings: list[_Naming] = []

    def take(self, record: Record) -> None:
        """Do what was recorded."""
        if record.kind in ("w", "t"):
            file = self._now.get(record.path)
            if file is not None:
                file.since.append((record.offset, record.data, 0) if record.kind == "w" else (None, b"", record.offset))
        elif record.kind == "s":
            self._sync(record.path)
        elif record.kind == "c":
            self._name(None, record.path, _File())
        elif record.kind == "u":
            self._name(record.path, None, self._now.get(record.path))
        elif record.kind in ("r", "l"):
            gone = record.path if record.kind == "r" else None
            self._name(gone, record.other, self._now[record.path])
        else:
            assert record.kind == "m", f"a journal's folder holds files only: {record}"

    def image(self, folder: Path, rng: random.Random) -> None:
        """Write one of the folders that a power loss may leave now."""
        names = dict(self._durable)
        kept = self._namings
        if rng.random() < 0.5:
            kept = kept[: rng.randrange(len(kept) + 1)]
        elif rng.random() < 0.5:
            kept = [naming for naming in kept if rng.random() < 0.5]
        for naming in kept:
            _rename(names, naming)
        for name, file in names.items():
            # The index of a WAL is memory that processes share: nobody believes it after a start.
            if not name.endswith("-shm"):
                (folder / name).write_bytes(file.image(rng))

    def _sync(self, path: str) -> None:
        if PurePath(path) == PurePath("."):
            for naming in self._namings:
                _rename(self._durable, naming)
            self._namings.clear()
        elif path in self._now:
            self._now[path].sync()

    def _name(self, gone: str | None, new: str | None, file: _File | None) -> None:
        naming = (gone, new, file)
        _rename(self._now, naming)
        self._namings.append(naming)


def _rename(names: dict[str, _File], naming: _Naming) -> None:
    gone, new, file = naming
    if gone is not None:
        names.pop(gone, None)
    if new is not None and file is not None:
        names[new] = file


def image_at(before: Path, records: Sequence[Record], num: int, folder: Path, rng: random.Random) -> None:
    """Write a folder that a power loss after so many calls may leave. before: the folder when the writer began."""
    disk = Disk(before)
    for record in records[:num]:
        disk.take(record)
    disk.image(folder, rng)
