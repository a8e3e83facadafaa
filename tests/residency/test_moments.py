import time
from collections.abc import Iterator
from datetime import UTC

import pytest

from residency.errors import SettingsError
from residency.moments import NS_PER_S, parse_moment, rfc3339

NOON_NS = 1_796_040_000 * NS_PER_S  # 2026-11-30T12:00:00Z


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("2026-11-30T12:00:00Z", NOON_NS),
        ("2026-11-30T14:00:00+02:00", NOON_NS),
        ("2026-11-30 12:00:00Z", NOON_NS),
        ("2026-11-30T12:00", NOON_NS),
        ("2026-11-30", NOON_NS - 43_200 * NS_PER_S),
        ("2026-11-30T12:00:00.123456789Z", NOON_NS + 123_456_789),
        ("2026-11-30T12:00:00.5+00:00", NOON_NS + 500_000_000),
        ("now", NOON_NS),
        ("2h ago", NOON_NS - 7200 * NS_PER_S),
        ("90 minutes ago", NOON_NS - 5400 * NS_PER_S),
        ("1 day ago", NOON_NS - 86_400 * NS_PER_S),
        (" 30S AGO ", NOON_NS - 30 * NS_PER_S),
    ],
)
def test_a_moment_is_read_as_people_write_it(text: str, expected_ns: int) -> None:
    assert parse_moment(text, now_ns=NOON_NS, name="--since") == expected_ns


@pytest.mark.parametrize(
    "text",
    ["", "yesterday-ish", "2h", "ago", "2026-13-01", "-2h ago", "12", "2026-11-30T12:00:00.Z", "9999-12-31T23:59:59Z"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="--since is .*RFC 3339"):
        parse_moment(text, now_ns=NOON_NS, name="--since")


@pytest.mark.parametrize(
    ("digits", "expected"),
    [(9, "2026-11-30T12:00:00.987654321Z"), (3, "2026-11-30T12:00:00.987Z"), (0, "2026-11-30T12:00:00Z")],
)
def test_a_moment_is_written_in_utc_and_cut(digits: int, expected: str) -> None:
    assert rfc3339(NOON_NS + 987_654_321, digits=digits) == expected


def test_a_written_moment_is_read_back_to_the_nanosecond() -> None:
    assert parse_moment(rfc3339(NOON_NS + 1), now_ns=0, name="--at") == NOON_NS + 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("03:12", "2026-11-30T03:12:00Z"),
        ("3:12", "2026-11-30T03:12:00Z"),
        ("03:12:05.25", "2026-11-30T03:12:05.250Z"),
        ("12:00", "2026-11-30T12:00:00Z"),
        # That has not come yet today.
        ("12:00:01", "2026-11-29T12:00:01Z"),
        ("23:59", "2026-11-29T23:59:00Z"),
    ],
)
def test_a_time_of_day_is_the_last_one_that_has_passed(text: str, expected: str) -> None:
    found = parse_moment(text, now_ns=NOON_NS, name="--at", zone=UTC)

    assert rfc3339(found, digits=3).replace(".000Z", "Z") == expected


@pytest.mark.parametrize("text", ["24:00", "03:60", "3", "03:12Z", "03.12"])
def test_what_is_no_time_of_day_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--at is .*03:12"):
        parse_moment(text, now_ns=NOON_NS, name="--at")


@pytest.fixture
def central_europe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("03:12", "2026-11-30T12:00:00Z", "2026-11-30T03:12:00+01:00"),
        ("03:12", "2026-07-01T12:00:00Z", "2026-07-01T03:12:00+02:00"),
        ("2026-07-01T03:12", "2026-11-30T12:00:00Z", "2026-07-01T03:12:00+02:00"),
        ("2026-07-01", "2026-11-30T12:00:00Z", "2026-07-01T00:00:00+02:00"),
        # Clocks are set back in that night, and show 02:30 twice: the first one is meant.
        ("02:30", "2026-10-25T12:00:00Z", "2026-10-25T02:30:00+02:00"),
        # A day of 23 hours is still a day back.
        ("23:30", "2026-03-29T12:00:00Z", "2026-03-28T23:30:00+01:00"),
    ],
)
def test_times_without_a_zone_are_those_of_this_machine(
    text: str, now: str, expected: str, central_europe: None
) -> None:
    now_ns = parse_moment(now, now_ns=0, name="now")

    assert rfc3339(parse_moment(text, now_ns=now_ns, name="--at", zone=None), digits=0, zone=None) == expected


def test_a_local_moment_is_read_back_to_the_nanosecond(central_europe: None) -> None:
    text = rfc3339(NOON_NS + 1, zone=None)

    assert text == "2026-11-30T13:00:00.000000001+01:00"
    assert parse_moment(text, now_ns=0, name="--at", zone=None) == NOON_NS + 1
