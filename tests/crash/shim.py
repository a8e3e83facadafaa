"""Stands between a process and the system's calls on a journal's files: see shim.c, which it compiles and tells."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("shim.c")
# Tells a process that it has the library, and where it is.
VARIABLE = "RESIDENCY_TEST_SHIM"


class NoShim(RuntimeError):
    """Raised where the library cannot be had; the text says why."""


class Kind(IntFlag):
    """Of calls. What `open` makes counts as a name, what it only opens does not."""

    WRITE = 1
    SYNC = 2
    TRUNCATE = 4
    LOCK = 8
    NAME = 16
    READ = 32
    OPEN = 64
    MAP = 128


# What changes something, or lets somebody else change it.
CHANGES = Kind.WRITE | Kind.SYNC | Kind.TRUNCATE | Kind.LOCK | Kind.NAME
EVERYTHING = CHANGES | Kind.READ | Kind.OPEN | Kind.MAP


class Action(IntEnum):
    """What happens at the chosen call. Halfway: a write writes half of its bytes; other calls are as without it."""

    NOTHING = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    KILL_HALFWAY = 3
    FAIL = 4
    FAIL_HALFWAY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One recorded call. kind: w(rite), s(ync), t(runcate), c(reate), d(irectory), r(ename), l(ink), u(nlink), m(ark).

    Paths are relative to the folder. offset: of a write, the new size of a truncate.
    """

    kind: str
    path: str
    other: str
    inode: int
    offset: int
    data: bytes


def build(folder: Path) -> Path:
    """Compile the library into a folder and return it. Raises NoShim."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoShim("there is no C compiler (cc) on this machine")
    made = folder / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(made), str(SOURCE), "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise NoShim(f"the C compiler cannot make the library: {ended.stderr.strip()[-200:]}")
    tried = subprocess.run(["true"], env={**os.environ, "LD_PRELOAD": str(made)}, capture_output=True, check=False)
    if tried.returncode != 0 or tried.stderr:
        raise NoShim(f"the system does not load the library into a process: {tried.stderr.decode()[-200:]}")
    return made


def environment(library: Path) -> dict[str, str]:
    """Return the environment of a process that is to have the library."""
    return {**os.environ, "LD_PRELOAD": str(library), VARIABLE: str(library)}


class Shim:
    """The library, in a process that was started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])
        self._library.shim_count.restype = ctypes.c_long
        self._library.shim_disturbed.restype = ctypes.c_char_p
        # What is started from here does without.
        os.environ.pop("LD_PRELOAD", None)

    def arm(
        self,
        folder: Path,
        *,
        kinds: Kind,
        action: Action = Action.NOTHING,
        at: int = 0,
        error: int = 0,
        sticky: bool = False,
        record: int = -1,
    ) -> None:
        """Count calls of these kinds on files in the folder from now on. at: the number of the one that is meant."""
        self._library.shim_arm(
            os.fsencode(os.path.realpath(folder)),
            *(ctypes.c_int(int(kinds)), ctypes.c_int(int(action)), ctypes.c_long(at)),
            *(ctypes.c_int(error), ctypes.c_int(sticky), ctypes.c_int(record)),
        )

    def disarm(self) -> None:
        """Let every call through from now on."""
        self._library.shim_disarm()

    def count(self) -> int:
        """Return how many calls were counted."""
        return int(self._library.shim_count())

    def disturbed(self) -> str:
        """Return which call was: its kind and its path; empty if none was."""
        kind, _, path = bytes(self._library.shim_disturbed()).decode().partition(" ")
        return f"{Kind(int(kind)).name} {path}" if kind else ""

    def mark(self, text: str) -> None:
        """Put a remark among what is recorded."""
        self._library.shim_mark(text.encode())


_HEAD = struct.Struct("=IIIIQqQ")


def read_records(path: Path, folder: Path) -> Iterator[Record]:
    """Yield what was recorded in a file, with paths below the folder."""
    content, at, root = path.read_bytes(), 0, os.path.realpath(folder)
    while at < len(content):
        kind, size, other_size, _, inode, offset, length = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        texts = content[at : at + size].decode(), content[at + size : at + size + other_size].decode()
        at += size + other_size
        data = content[at : at + length] if chr(kind) == "w" else b""
        at += len(data)
        names = [text if chr(kind) == "m" or not text else os.path.relpath(text, root) for text in texts]
        yield Record(kind=chr(kind), path=names[0], other=names[1], inode=inode, offset=offset, data=data)
