from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.journal.events import Event
from residency.journal.hashing import Column, blob_digest, hash_columns, hash_event, hash_row
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


# Most rows are such as any journal has; the others are damaged, and must be hashed alike all the same.
usual = st.tuples(
    *(st.integers(-(2**63), 2**63 - 1), st.text(), st.integers(0, 2**63 - 1), st.uuids().map(str), st.text()),
    *(st.integers(0, 5), st.integers(0, 2), st.sampled_from(["measured", "serving"]), st.just(1)),
    *(st.none() | st.just("measuring"), st.none() | st.just("planned"), st.none() | st.just("plan")),
    *(st.integers(0, 2**63 - 1), st.text(), st.integers(0, 2**31), st.none() | st.uuids().map(str)),
    *(st.binary(), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32)),
)
odd = st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text() | st.binary()


@given(usual, st.integers(0, 18), odd, st.booleans())
def test_a_row_hashes_as_its_columns_do(row: tuple[Any, ...], index: int, value: Any, is_damaged: bool) -> None:
    if is_damaged:
        row = (*row[:index], value, *row[index + 1 :])
    assert hash_row(row) == hash_columns(row[:-1])


def test_what_python_takes_for_equal_does_not_hash_alike() -> None:
    first = (1, "s", 1, "x" * 36, "e")
    rest = (0, 0, "measured", 1, None, None, None, 1, "boot", 1, None, b"{}", bytes(32), bytes(32))
    values: tuple[Any, ...] = (1, 1.0, True, "1", b"1")
    hashes = {hash_row((*first, one, *rest[1:])) for one in values}
    assert len(hashes) == 4  # SQLite has no booleans


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
