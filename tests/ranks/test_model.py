"""The protocol, explored exhaustively: it holds as it is, and each thing left out of it breaks it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(("ranks", "lives", "rounds"), [(2, 2, 1), (2, 3, 1), (3, 1, 1)])
def test_no_two_ranks_serve_different_committed_rounds_and_none_that_was_served_is_forgotten(
    model: Any, ranks: int, lives: int, rounds: int
) -> None:
    bounds = model.Bounds(num_ranks=ranks, num_lives=lives, num_rounds=rounds)
    found = model.explore(model.Variant.CHOSEN, bounds, model.serves_two, model.forgets)
    assert found.broken is None, found.way
    # It is no empty promise: rounds are committed, restored after crashes, and served on when others have ended.
    assert found.committed and found.survived
    assert found.restored or lives == 1
    assert found.num_states > 1_000


@pytest.mark.parametrize(
    ("variant", "lives", "rounds"),
    [("ONE_PHASE", 1, 2), ("NO_REGISTER", 1, 2), ("UNDECIDED_ROLLS_BACK", 1, 2), ("OWN_MEMORY", 3, 1)],
)
def test_with_something_left_out_ranks_serve_different_committed_rounds(
    model: Any, variant: str, lives: int, rounds: int
) -> None:
    bounds = model.Bounds(num_ranks=2, num_lives=lives, num_rounds=rounds)
    found = model.explore(model.Variant[variant], bounds, model.serves_two)
    assert found.broken is not None and "different committed rounds" in found.broken
    assert found.way


def test_a_vote_before_its_rank_is_prepared_lets_a_served_round_be_forgotten(model: Any) -> None:
    bounds = model.Bounds(num_ranks=2, num_lives=2, num_rounds=1)
    found = model.explore(model.Variant.VOTES_BEFORE_PREPARING, bounds, model.forgets)
    assert found.broken is not None and "would not find it" in found.broken
