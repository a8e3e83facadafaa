from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.journal.events import Event
from residency.journal.hashing import Column, blob_digest, hash_columns, hash_event
from residency.journal.sqlite import is_safe

columns = st.lists(st.one_of(st.none(), st.integers(), st.text(), st.binary()), max_size=6)


def test_the_hash_of_a_known_event_never_changes() -> None:
    # Journals that exist were hashed so; a change here breaks every one of them.
    event = Event(
        position=1,
        stream="worker",
        stream_version=1,
        event_id="0b8f6f0e-93a1-4a35-9d2e-6f4b1f9f4a10",
        epoch="e",
        round=0,
        rank=0,
        type="epoch.started",
        schema_version=1,
        from_state=None,
        to_state=None,
        trigger=None,
        recorded_at=1_700_000_000_000_000_000,
        boot_id="boot",
        pid=1,
        causation=None,
        payload=b"{}",
        previous_hash=bytes(32),
        hash=b"",
    )
    assert hash_event(event).hex() == "af0ec0ff04435768cb723e8348ec851c32e617370c1e4427e87faf6b092036c3"


@given(columns, columns)
def test_different_rows_never_share_a_hash(one: list[Column], other: list[Column]) -> None:
    assert (hash_columns(one) == hash_columns(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["1"], [1]),
        ([b"a"], ["a"]),
        ([None], [""]),
        ([""], []),
        ([None, "a"], ["a", None]),
    ],
)
def test_rows_that_look_alike_differ(one: list[Column], other: list[Column]) -> None:
    assert hash_columns(one) != hash_columns(other)


def test_a_blob_is_named_by_the_sha256_of_its_bytes() -> None:
    assert blob_digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 9), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), False),
        ((3, 53, 0), True),
        ((3, 53, 4), True),
        ((4, 0, 0), True),
    ],
)
def test_a_sqlite_that_loses_rows_is_known_by_its_version(version: tuple[int, ...], safe: bool) -> None:
    assert is_safe(version) is safe
