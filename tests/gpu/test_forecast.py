"""What is expected next: the requests before, however they were cut, and never an assumption about order."""

from __future__ import annotations

from itertools import islice

import pytest

from residency.gpu.forecast import LOOKAHEAD_MAX, Forecast


def learned(*requests: str) -> Forecast[str]:
    forecast: Forecast[str] = Forecast()
    for request in requests:
        forecast.begin()
        for token in request:
            forecast.note(token)
        forecast.end()
    return forecast


def expected(forecast: Forecast[str], number: int = 8) -> str:
    return "".join(islice(forecast.ahead(), number))


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert expected(learned()) == expected(learned("")) == ""


def test_the_next_request_is_expected_to_be_as_the_last() -> None:
    assert expected(learned("abcbc"), 7) == "abcbc"
    forecast = learned("abcd")
    forecast.begin()
    forecast.note("a")
    forecast.note("b")
    assert expected(forecast) == "cdab"


@pytest.mark.parametrize(
    ("requests", "following"),
    [
        (["a", "bc", "a"], "bca"),
        (["a", "b", "b", "b", "a", "b", "b", "b", "a", "b"], "bbab"),
        (["a", "b", "b", "b", "a", "b", "b", "b", "a", "b", "b", "b"], "abbb"),
        (["x", "ab", "cd", "ab"], "cdab"),
    ],
)
def test_requests_that_belong_together_are_learned_together(requests: list[str], following: str) -> None:
    assert expected(learned(*requests), len(following)) == following


def test_a_jump_goes_on_from_where_the_token_was_expected() -> None:
    forecast = learned("abcdef")
    forecast.begin()
    forecast.note("d")
    assert expected(forecast, 3) == "efa"
    forecast.note("b")
    assert expected(forecast, 3) == "cde"
    forecast.note("unknown")
    assert expected(forecast, 3) == "cde"


def test_within_a_first_request_what_it_did_before_is_expected_again() -> None:
    forecast: Forecast[str] = Forecast()
    forecast.begin()
    for token in "abcabca":
        forecast.note(token)
    assert expected(forecast, 2) == "bc"
    assert not forecast.is_last("a")


def test_the_last_use_is_known_once_a_whole_request_was_seen() -> None:
    forecast = learned("abcbcd")
    forecast.begin()
    found = []
    for token in "abcbcd":
        forecast.note(token)
        found.append(forecast.is_last(token))
    assert found == [True, False, False, True, True, True]


def test_what_was_learned_can_be_forgotten_and_every_look_ahead_is_bounded() -> None:
    forecast = learned("ab" * LOOKAHEAD_MAX)
    assert len(list(forecast.ahead())) == LOOKAHEAD_MAX
    forecast.forget()
    assert expected(forecast) == ""
