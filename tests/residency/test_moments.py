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
    "text", ["", "yesterday-ish", "2h", "ago", "2026-13-01", "-2h ago", "12", "2026-11-30T12:00:00.Z"]
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
