"""Canonical JSON: the bytes of a payload as they are written and hashed."""

from __future__ import annotations

from typing import Any

import msgspec

from residency.errors import JournalError


def canonical_json(value: Any) -> bytes:
    """Return the value as JSON with sorted keys and no spaces. NaN and infinities become null.

    Text that is no Unicode (file names can be such) is written with backslash escapes.

    Raises:
        JournalError: the value is not JSON.
    """
    try:
        try:
            return msgspec.json.encode(value, order="sorted")
        except UnicodeEncodeError:
            return msgspec.json.encode(_as_unicode(msgspec.to_builtins(value)), order="sorted")
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise JournalError(
            journal="payload", problem=f"cannot be written as JSON ({error})", remedy="report this as a defect"
        ) from error


def as_unicode(text: str) -> str:
    """Return the text with what is no Unicode written as backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _as_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return as_unicode(value)
    if isinstance(value, dict):
        return {_as_unicode(key): _as_unicode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_unicode(item) for item in value]
    return value
