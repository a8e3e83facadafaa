from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from residency.cli.compare import footprint, moved
from residency.gpu.placement import ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.specs import ComponentSpec, LayerGroupSpec
from residency.journal.events import Draft, EventType

MIB = 2**20


def layerwise(**fields: Any) -> ComponentPlacement:
    base: dict[str, Any] = {"mode": Mode.LAYERWISE_OFFLOAD, "tier": HostTier.PINNED, "num_slots": 2}
    return ComponentPlacement(**{**base, **fields})


RESIDENT = ComponentPlacement(mode=Mode.RESIDENT)
OFFLOADED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
SPEC = ComponentSpec(
    name="dit",
    class_name="Dit",
    total_bytes=50 * MIB,
    groups=(LayerGroupSpec(name="blocks", layer_bytes=(10 * MIB,) * 4),),
    modes=tuple(Mode),
    fixed_reason=None,
    weights_digest="ef" * 32,
    entry_points=("forward",),
)


def one(placement: ComponentPlacement) -> Placement:
    return Placement(components={"dit": placement})


@pytest.mark.parametrize(
    ("before", "after", "what", "held"),
    [
        (OFFLOADED, RESIDENT, ("component-offload (pageable) -> resident",), (0, 50)),
        (
            layerwise(),
            layerwise(resident_layers={"blocks": (0, 1)}, held_layers={"blocks": (3,)}),
            ("blocks: 1 streamed -> held (10.00 MiB)", "blocks: 2 streamed -> resident (20.00 MiB)"),
            (10, 30),
        ),
        (
            layerwise(resident_layers={"blocks": (0,)}),
            layerwise(resident_layers={"blocks": (2,)}),
            ("blocks: 1 resident -> streamed (10.00 MiB)", "blocks: 1 streamed -> resident (10.00 MiB)"),
            (20, 20),
        ),
        (
            layerwise(),
            layerwise(tier=HostTier.PAGEABLE, num_slots=3, window_bytes=40 * MIB, yield_bytes=5 * MIB),
            ("host copy pinned -> pageable", "slots 2 -> 3", "window 0 B -> 40.00 MiB", "yields 0 B -> 5.00 MiB"),
            (10, 10),
        ),
    ],
)
def test_what_moved_is_told_by_layer_and_in_bytes(
    before: ComponentPlacement, after: ComponentPlacement, what: tuple[str, ...], held: tuple[int, int]
) -> None:
    (found,) = moved(one(before), one(after), {"dit": SPEC})

    assert found.what == what
    assert (found.before_bytes, found.after_bytes) == (held[0] * MIB, held[1] * MIB)
    (unknown,) = moved(one(before), one(after), {})
    assert (unknown.before_bytes, unknown.after_bytes) == (None, None)


def test_a_component_that_only_one_knows_differs() -> None:
    both = Placement(components={"dit": RESIDENT, "vae": RESIDENT})

    (found,) = moved(one(RESIDENT), both, {"dit": SPEC})

    assert (found.component, found.before, found.after, found.what) == ("vae", None, RESIDENT, ("only in B: resident",))
    assert footprint(both, {"dit": SPEC}) is None


def test_the_footprint_is_weights_window_and_pinned_copies() -> None:
    found = footprint(one(layerwise(resident_layers={"blocks": (0,)})), {"dit": SPEC})

    assert found is not None
    # Outside the layers 10 MiB, one resident layer, two slots, and the other three layers page-locked.
    assert (found.weight_bytes, found.window_bytes, found.pinned_bytes) == (20 * MIB, 20 * MIB, 30 * MIB)


def digest_of(text: str, run: Callable[..., Any]) -> str:
    found: str = run("at", text, "--json", "--journal", "journal.db").json()[0]["digest"]
    return found


def test_equal_is_0_and_different_is_1(committed: Any, run: Callable[..., Any]) -> None:
    initial, planned = digest_of("1", run), digest_of("9", run)

    assert run("diff", planned[:12], "1", "--journal", "journal.db").code == 0
    assert run("diff", initial[:12], "1", "--journal", "journal.db").code == 1


def test_two_placements_by_the_beginning_of_their_digests(committed: Any, run: Callable[..., Any]) -> None:
    initial, planned = digest_of("1", run), digest_of("9", run)

    done = run("diff", initial[:8], planned[:8], "--journal", "journal.db")
    (plain,) = run("diff", initial, planned, "--json", "--journal", "journal.db").json()

    assert f"A placement {initial}" in done.out
    assert "component-offload (pinned) -> layerwise-offload (pageable, 2 slots, blocks: 2 resident)" in done.out
    # The prediction of the one is its plan's; of the other, that plan's runner-up.
    assert "predicted request time: 2.50 s -> 1.90 s (-24.0%)" in done.out
    assert "measured in A only, 128x96, 6 steps: 2.50 s (median of 1)" in done.out
    assert (plain["equal"], [part["component"] for part in plain["components"]]) == (False, ["transformer"])
    assert (plain["a"]["predicted_ns"], plain["b"]["predicted_ns"]) == (2_500_000_000, 1_900_000_000)


def test_two_rounds_with_what_differed_in_their_starts(
    crashed: Any, measured: Callable[..., None], run: Callable[..., Any]
) -> None:
    measured(crashed, round_number=2, epoch="epoch-2")

    done = run("diff", "1", "2", "--journal", "journal.db")

    assert done.code == 0
    assert done.out.startswith("A round 1, committed: placement ")
    assert "the placements are equal" in done.out
    # Nothing was timed under that placement in round 1: its requests of other rounds stand in.
    assert "measured request time, 128x96, 6 steps: 2.50 s -> 2.50 s (medians of 1 and 1)" in done.out
    assert "the rounds differ in the fingerprint: cap_bytes was 400.00 MiB, is 500.00 MiB" in done.out


def test_sizes_come_from_the_newest_life_that_told_them(committed: Any, run: Callable[..., Any]) -> None:
    told = [{**msgspec.to_builtins(SPEC), "name": name} for name in ("text_encoder", "transformer", "vae")]
    payload = {"fingerprint": {}, "fingerprint_digest": "f", "initial_placement": digest_of("1", run), "specs": told}
    committed.write(Draft(type=EventType.EPOCH_STARTED, round=0, payload=payload), epoch="epoch-2")

    done = run("diff", digest_of("1", run), digest_of("9", run), "--journal", "journal.db")

    # From whole on the host to its parts outside the layers and two layers of four.
    assert "0 B -> 30.00 MiB (+30.00 MiB)" in done.out
    assert "weights on the device between requests: 50.00 MiB -> 80.00 MiB (+30.00 MiB)" in done.out
    assert "pinned host copies: 100.00 MiB -> 50.00 MiB (-50.00 MiB)" in done.out


def test_two_exported_files_need_no_journal(tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "old.json").write_bytes(one(OFFLOADED).to_bytes())
    (tmp_path / "new.json").write_bytes(one(RESIDENT).to_bytes())

    done = run("diff", "old.json", "./new.json")

    assert done.code == 1
    assert done.err.startswith("without bytes and times: journal ")
    assert "component-offload (pageable) -> resident" in done.out


def test_a_file_is_compared_with_a_round(committed: Any, tmp_path: Path, run: Callable[..., Any]) -> None:
    placement = committed.journal.blob(digest_of("9", run))
    (tmp_path / "exported").write_bytes(placement)

    assert run("diff", "./exported", "1", "--journal", "journal.db").code == 0


@pytest.mark.parametrize("name", ["7", "abc", "0000", "feed", "missing.json", "notes.json", "worker"])
def test_what_names_nothing_is_usage(name: str, committed: Any, tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "notes.json").write_text("{}")

    done = run("diff", "1", name, "--journal", "journal.db")

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_a_beginning_that_several_share_is_unclear(committed: Any, run: Callable[..., Any]) -> None:
    # Until two digests begin alike.
    num, found = 0, dict[str, Placement]()
    while True:
        placement = one(layerwise(num_slots=num + 1))
        if placement.digest[:4] in found:
            break
        found[placement.digest[:4]] = placement
        num += 1
    other = found[placement.digest[:4]]
    note = Draft(type=EventType.GATED, round=0, payload={"reason": "-"}, blobs=(placement.to_bytes(), other.to_bytes()))
    committed.write(note)

    done = run("diff", "1", placement.digest[:4], "--journal", "journal.db")

    assert done.code == 2
    assert placement.digest[:8] in done.err and other.digest[:8] in done.err
