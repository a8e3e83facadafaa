"""Moments in time as people write and read them: RFC 3339, '2h ago', '03:12', and integer ns in between."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta, tzinfo

from residency.errors import SettingsError

NS_PER_S = 1_000_000_000
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGO = re.compile(r"([0-9]{1,9})\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?)\s+ago", re.IGNORECASE)
_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")
_NS_MAX = 2**63 - 1  # what a journal can hold: in the year 2262
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_moment(text: str, *, now_ns: int, name: str, zone: tzinfo | None = UTC) -> int:
    """Return ns since the Unix epoch for an RFC 3339 time, a date, '2h ago', or a time of day such as '03:12'.

    A time of day is the last one that has passed. zone: of times that name none, and of days; None is this machine's.
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
    fraction_ns = int((fraction[1] if fraction else "").ljust(9, "0")[:9])
    try:
        if of_day := _TIME_OF_DAY.fullmatch(whole):
            wanted = time(int(of_day[1]), int(of_day[2]), int(of_day[3] or 0))
            return _last(wanted, fraction_ns, now_ns=now_ns, zone=zone)
        if re.search(r"[.,]", whole):
            raise ValueError(whole)
        moment_ns = _seconds(datetime.fromisoformat(whole), zone) * NS_PER_S + fraction_ns
        if moment_ns > _NS_MAX:
            raise ValueError(whole)
        return moment_ns
    except (ValueError, OverflowError):
        raise SettingsError(
            f"{name} is {text!r}; write an RFC 3339 time such as 2026-11-30T15:00:00Z, the time of day of the last 24 "
            "hours, such as 03:12, or how long ago, such as '2h ago'",
            name=name,
            value=text,
        ) from None


def _last(wanted: time, fraction_ns: int, *, now_ns: int, zone: tzinfo | None) -> int:
    """Return the last moment, up to now, at which clocks of that zone showed the time."""
    today = datetime.fromtimestamp(now_ns // NS_PER_S, zone).date()
    # Where clocks are set, a day is 23 or 25 hours long: never counted back in hours.
    days = (datetime.combine(today - timedelta(days=back), wanted) for back in range(3))
    moments = [_seconds(day, zone) * NS_PER_S + fraction_ns for day in days]
    return next(moment for moment in moments if moment <= now_ns)


def _seconds(moment: datetime, zone: tzinfo | None) -> int:
    """Return whole seconds since the Unix epoch. Of a time that clocks show twice in a night, the first."""
    if moment.tzinfo is None and zone is None:
        return int(moment.timestamp())
    aware = moment if moment.tzinfo else moment.replace(tzinfo=zone)
    return (aware - _EPOCH) // timedelta(seconds=1)


def rfc3339(at_ns: int, *, digits: int = 9, zone: tzinfo | None = UTC) -> str:
    """Return a moment as RFC 3339, with so many digits of the second's fraction (cut, not rounded).

    zone: None is this machine's, shown with its offset; UTC is shown as Z.
    """
    seconds, fraction_ns = divmod(at_ns, NS_PER_S)
    if zone is UTC:
        base, offset = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S"), "Z"
    else:
        text = datetime.fromtimestamp(seconds, UTC).astimezone(zone).isoformat()
        # The offset may hold seconds: zones before they were agreed on.
        base, offset = text[:19], text[19:]
    return f"{base}.{fraction_ns:09d}"[: len(base) + 1 + digits].rstrip(".") + offset
