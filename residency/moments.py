"""Moments in time as people write and read them: RFC 3339, '2h ago', and integer ns in between."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from residency.errors import SettingsError

NS_PER_S = 1_000_000_000
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGO = re.compile(r"([0-9]{1,9})\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?)\s+ago", re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_moment(text: str, *, now_ns: int, name: str) -> int:
    """Return ns since the Unix epoch for an RFC 3339 time, a date, or '2h ago'. No zone means UTC.

    Raises SettingsError, naming the option, for anything else.
    """
    cleaned = text.strip()
    if cleaned.lower() == "now":
        return now_ns
    if ago := _AGO.fullmatch(cleaned):
        return now_ns - int(ago[1]) * _UNIT_SECONDS[ago[2][0].lower()] * NS_PER_S
    # datetime holds microseconds only, the journal nanoseconds: the fraction is added as it is written.
    fraction = re.search(r"(?<=:[0-9]{2})[.,]([0-9]+)", cleaned)
    whole = cleaned.replace(fraction[0], "", 1) if fraction else cleaned
    try:
        if re.search(r"[.,]", whole):
            raise ValueError(whole)
        moment = datetime.fromisoformat(whole)
    except ValueError:
        raise SettingsError(
            f"{name} is {text!r}; "
            "write an RFC 3339 time such as 2026-11-30T15:00:00Z, or how long ago, such as '2h ago'",
            name=name,
            value=text,
        ) from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(seconds=1) * NS_PER_S + int(
        (fraction[1] if fraction else "").ljust(9, "0")[:9]
    )


def rfc3339(at_ns: int, *, digits: int = 9) -> str:
    """Return a moment as RFC 3339 in UTC, with so many digits of the second's fraction (cut, not rounded)."""
    seconds, fraction_ns = divmod(at_ns, NS_PER_S)
    base = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{base}.{fraction_ns:09d}"[: len(base) + 1 + digits].rstrip(".") + "Z"
