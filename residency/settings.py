"""Everything the environment decides, read here and nowhere else: kill switch, journal, name, allocator settings."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from residency.errors import JournalError, SettingsError, SizeError
from residency.journal.location import beside, journal_path

log = logging.getLogger(__name__)

# The second name is the one that workers of this kind already set; both mean the same.
KILL_SWITCHES = ("RESIDENCY_DISABLE", "SGLANG_DIFFUSION_DISABLE_AUTO_RESIDENCY")
OFF_WORDS = frozenset({"", "0", "false", "no", "off"})
ON_WORDS = frozenset({"1", "true", "yes", "on"})
# torch reads the first that is set; the later ones are the older names.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?B)", re.IGNORECASE)
_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}

TOKEN_CHARACTERS_MIN = 16  # fewer can be tried one after the other
TOKEN_FILE_BYTES_MAX = 4096
_TOKEN = re.compile(r"[!-~]+")  # what a header can carry

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSwitch:
    """A kill switch that is on. by: the variable, or 'sentinel'; value: its text, or the sentinel's path."""

    by: str
    value: str


def kill_switch(sentinel: Path | None = None) -> KillSwitch | None:
    """Return the kill switch that is on, or None. Read anew at every call, since it may be thrown at any time.

    A word that is neither on nor off counts as on, and is warned about once: a kill switch fails safe.
    """
    for name in KILL_SWITCHES:
        value = os.environ.get(name, "")
        word = value.strip().lower()
        if word in OFF_WORDS:
            continue
        if word not in ON_WORDS and (name, value) not in _warned:
            _warned.add((name, value))
            log.warning("%s is %r, which is neither on nor off; taken as on, write 1 or 0", name, value)
        return KillSwitch(by=name, value=value)
    if sentinel is not None and os.path.lexists(sentinel):
        return KillSwitch(by="sentinel", value=str(sentinel))
    return None


def state_directory() -> Path:
    """Return residency's folder in the user's state directory (XDG). It need not exist."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base.startswith("/") else Path("~/.local/state").expanduser()
    return root / "residency"


def journal_location(given: str | os.PathLike[str] | None = None) -> str:
    """Return the path or URL of the journal: the one given, else RESIDENCY_JOURNAL, else the user's own."""
    if not isinstance(given, (str, os.PathLike, type(None))):
        raise SettingsError(f"the journal is {given!r}; give a path or a URL, or leave it out", journal=repr(given))
    chosen = os.fspath(given) if given is not None else os.environ.get("RESIDENCY_JOURNAL", "")
    if given is not None and not chosen.strip():
        raise SettingsError("the journal's path is empty; give a path or a URL, or leave it out", journal=chosen)
    return chosen or str(state_directory() / "journal.db")


def sqlite_path(location: str) -> Path | None:
    """Return the absolute path of a SQLite journal (a path or a sqlite:/// URL), None for anything else."""
    try:
        return journal_path(location)
    except JournalError:
        return None


def sentinel_path(location: str) -> Path:
    """Return the file whose existence switches residency off from outside a running process."""
    path = sqlite_path(location)
    if path is None:
        return state_directory() / "disable"
    return beside(path, ".disable")


def worker_name(given: str | None = None) -> str | None:
    """Return the worker's name: the one given, else RESIDENCY_NAME, else None (a digest is used then)."""
    return given or os.environ.get("RESIDENCY_NAME") or None


def allocator_settings() -> str:
    """Return the setting of torch's allocator that is in force, '' without one. Part of the fingerprint."""
    return next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def num_local_ranks() -> int:
    """Return how many processes of one launch share the host: LOCAL_WORLD_SIZE, which launchers set, else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def control_token(given: str | None = None, *, file: str | os.PathLike[str] | None = None) -> str | None:
    """Return the token of control requests: given, of a file, RESIDENCY_CONTROL_TOKEN, RESIDENCY_CONTROL_TOKEN_FILE.

    The first of these that is there counts; None without any. A file's white space at both ends is not part of it.
    Raises SettingsError, which never tells the token, for one that is empty, short or not of printable ASCII.
    """
    if given is not None:
        return _checked_token(given, source="the token")
    if file is not None:
        return _token_of_file(file)
    if (text := os.environ.get("RESIDENCY_CONTROL_TOKEN")) is not None:
        return _checked_token(text, source="RESIDENCY_CONTROL_TOKEN")
    path = os.environ.get("RESIDENCY_CONTROL_TOKEN_FILE")
    return None if path is None else _token_of_file(path)


def _token_of_file(path: str | os.PathLike[str]) -> str:
    shown = os.fspath(path)
    try:
        with open(path, "rb") as stream:
            content = stream.read(TOKEN_FILE_BYTES_MAX + 1)
        if len(content) > TOKEN_FILE_BYTES_MAX:
            raise SettingsError(
                f"token file {shown!r} has over {TOKEN_FILE_BYTES_MAX} bytes; write nothing but the token into it"
            )
        text = content.decode("ascii").strip()
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise SettingsError(
            f"token file {shown!r} cannot be used: {problem}; name a file that holds the token and nothing else"
        ) from None
    return _checked_token(text, source=f"token file {shown!r}")


def _checked_token(text: str, *, source: str) -> str:
    # An empty one is most likely a secret that was not mounted, and must not mean that no token is needed.
    if len(text) < TOKEN_CHARACTERS_MIN or not _TOKEN.fullmatch(text):
        raise SettingsError(
            f"{source} has {len(text)} characters; it needs at least {TOKEN_CHARACTERS_MIN}, all printable ASCII "
            "without spaces, such as those of: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return text


def completion_request() -> str:
    """Return what a shell asks for while a command is typed, '' if nothing; the shell's own script sets it."""
    return os.environ.get("_RESIDENCY_COMPLETE", "")


def wants_color() -> bool:
    """Whether colour may be used on a terminal: the convention NO_COLOR says no."""
    return not os.environ.get("NO_COLOR")


def parse_size(value: object, *, name: str = "size") -> int:
    """Return the bytes of '24GiB', '1.5GiB', '512MiB', '24GB' (powers of 1000) or '800B'; raises SizeError.

    A number without a unit is refused: 24 may have meant GiB, and 24 bytes would be obeyed.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise SizeError(name=name, value=value)
    size = Decimal(match[1]) * _UNITS[match[2].lower()]
    if size < 1:
        raise SizeError(name=name, value=value)
    return int(size)
