"""Errors as values: they cross processes, and each says with which code a worker ends."""

from __future__ import annotations

import copy
import pickle

import pytest

from residency import errors
from residency.errors import ResidencyError
from residency.journal.pg_session import Conflict, ConnectionLost

EVERY_ERROR = [
    ResidencyError("something is wrong; put it right", subject="a thing"),
    errors.SettingsError("a setting is wrong; write another", setting="x"),
    errors.SizeError(name="vram", value="24"),
    errors.WorkloadError(field="width", value=None),
    errors.UnknownComponent(component="unet", known=("vae", "transformer")),
    errors.NotAModule(component="tokenizer", found="str"),
    errors.ModeUnavailable(component="vae", mode="layerwise-offload", reason="no layers", possible=("resident",)),
    errors.JournalError(journal="j.db", problem="is a folder", remedy="name a file"),
    errors.StreamInUse(journal="j.db", stream="worker", holder="process 3"),
    errors.JournalNewer(journal="j.db", found=9, known=1),
    errors.JournalCorrupt(journal="j.db", problem="is malformed", remedy="name another"),
    errors.TransitionRefused(round_number=1, state="planned", trigger="commit", reason="not validated"),
    errors.PipelineBusy(holder="a request", waited_s=0.5),
    errors.CaptureRefused(component="unet"),
    errors.StaleRequest(epoch="a", round_number=1, current_epoch="b", current_round=2),
    errors.EffectFailed(component="vae", action="placing", problem="out of memory"),
    errors.RollbackFailed(round_number=1, problems=("vae: lost", "unet: lost")),
    errors.ProcessPoisoned(round_number=1, problem="CUDA error: misaligned address"),
    errors.OutsideEnvelope(units=2_000_000, units_max=1_048_576),
    errors.RankFailed(rank=2, problem="no sign of life for 20 s", pinned=False),
    errors.RoundUndecided(round_number=3, problem="the group's store is lost"),
    errors.PlacementInfeasible(needed_bytes=2**30, cap_bytes=2**20, bound_by="component 'vae'"),
    errors.MeasurementRefused(subject="record 2 (baseline)", problem="phase 'use:vae' took -5 ns"),
    errors.WarmupFailed(problem="returned nothing"),
    # Kinds of a documented error that only the package itself tells apart.
    Conflict(journal="postgresql://h/d", problem="was busy", remedy="try again"),
    ConnectionLost(journal="postgresql://h/d", problem="went away", remedy="start it"),
]


def every_class(root: type[ResidencyError] = ResidencyError) -> set[type[ResidencyError]]:
    # Those of the product: other tests make some of their own.
    ours = [one for one in root.__subclasses__() if one.__module__.startswith("residency.")]
    return {root}.union(*map(every_class, ours))


def test_no_class_is_forgotten_here() -> None:
    assert {type(error) for error in EVERY_ERROR} == every_class()


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickle_and_copying(error: ResidencyError) -> None:
    others = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]

    for other in [*others, copy.copy(error), copy.deepcopy(error)]:
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert (other.fields, other.exit_code) == (error.fields, error.exit_code)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_a_message_is_one_line_of_fact_and_remedy(error: ResidencyError) -> None:
    text = str(error)

    assert "\n" not in text
    assert text[0].islower()
    assert not text.endswith(".")


def test_exit_codes_are_the_documented_ones() -> None:
    assert errors.__doc__ is not None
    for kind in every_class():
        name = next(one.__name__ for one in kind.__mro__ if one.__module__ == errors.__name__)
        line = next(line for line in errors.__doc__.splitlines() if name in line.split())
        # The root's line is the heading of the column.
        documented = 1 if kind is ResidencyError else int(line.split(name)[1].split()[0])
        assert kind.exit_code == documented
