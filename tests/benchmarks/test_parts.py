"""The parts that need no device: shards, traces, host memory, processes that end at their bound."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.request_time_host import host_reading
from benchmarks.request_time_link import layer_speed
from benchmarks.request_time_runs import run_program, weights_folder
from benchmarks.request_time_shards import (
    GIB,
    LINK,
    MIB,
    PEERS,
    RESIDENT,
    SHARDS,
    Mode,
    Settings,
    parse_caps,
    parse_peers,
    timeout_s,
)
from benchmarks.request_time_timeline import timeline_of
from residency.errors import SizeError


def test_caps_are_gib_or_have_a_unit_and_come_largest_first() -> None:
    assert parse_caps("8, 24,1.5") == (24 * GIB, 8 * GIB, int(1.5 * GIB))
    assert parse_caps("48MiB") == (48 * MIB,)
    with pytest.raises(SizeError):
        parse_caps("lots")


def test_peers_are_named_or_all_and_come_under_every_cap() -> None:
    assert parse_peers("none", (GIB,)) == ()
    assert [mode.name for mode in parse_peers("group-leaf", (2 * GIB, GIB))] == ["group-leaf@2GiB", "group-leaf@1GiB"]
    assert [mode.kind for mode in parse_peers("all", (GIB,))] == list(PEERS)
    with pytest.raises(ValueError, match="no peer ours"):
        parse_peers("ours", (GIB,))


@pytest.mark.parametrize("shard", SHARDS.values(), ids=lambda shard: shard.name)
def test_every_shard_measures_link_and_resident_first_and_no_mode_may_take_all_of_ten_minutes(shard: Any) -> None:
    assert [mode.kind for mode in shard.modes[:2]] == [LINK, RESIDENT]
    assert all(mode.cap_bytes for mode in shard.modes[2:])
    assert max(timeout_s(mode, shard.settings) for mode in shard.modes) < 600


def test_compiling_and_more_steps_give_a_process_more_time_but_not_the_link() -> None:
    plain, slow = Settings(pipeline="flux"), Settings(pipeline="flux", steps=28, compiled=True)

    assert timeout_s(Mode(kind=LINK), slow) == timeout_s(Mode(kind=LINK), plain)
    assert timeout_s(Mode(kind=RESIDENT), slow) > timeout_s(Mode(kind=RESIDENT), plain)


def event(kind: str, name: str, start_us: float, duration_us: float, nbytes: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start_us, "dur": duration_us, "args": {"bytes": nbytes}}


def test_a_trace_tells_copying_from_computing() -> None:
    events = [
        event("cpu_op", "aten::mm", 0, 50),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1_000, 2_000, MIB),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1_000, 5, 616),  # token ids
        event("kernel", "gemm", 2_000, 1_000),
        event("kernel", "gemm", 3_010, 990),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 5_000, 100, MIB),
        event("kernel", "norm", 5_900, 100),
        event("gpu_user_annotation", "layer transformer.blocks.3", 2_000, 2_000),
        event("gpu_user_annotation", "something else", 2_000, 2_000),
        {"ph": "M", "name": "process_name"},
    ]

    timeline = timeline_of(events)

    assert timeline["span_ms"] == 5.0
    assert timeline["copies"] == [[0.0, 2.0, MIB]]
    assert timeline["to_host"] == [[4.0, 4.1, MIB]]
    assert timeline["compute"] == [[1.0, 3.0], [4.9, 5.0]]
    assert timeline["layers"] == [["transformer.blocks.3", 1.0, 3.0]]
    assert timeline["busy_ms"] == {"compute_only": 1.1, "copy_only": 1.0, "both": 1.0, "neither": 1.9}


def test_a_trace_without_a_device_is_an_empty_timeline() -> None:
    assert timeline_of([event("cpu_op", "aten::mm", 0, 50)])["span_ms"] == 0.0


def test_the_link_at_mixed_layer_sizes_is_as_fast_as_its_copies_together() -> None:
    assert layer_speed({100: 50.0, 300: 100.0}, [100, 300]) == pytest.approx(400 / 5)


def test_host_memory_is_read_in_bytes_and_what_is_missing_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nRssAnon:\t 1024 kB\n", encoding="utf-8")

    assert host_reading(tmp_path) == {"peak_bytes": 2 * MIB, "anonymous_bytes": MIB}


def test_a_process_that_exceeds_its_bound_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()

    ended = run_program(["http.server", "0", "--bind", "127.0.0.1"], tmp_path / "log", limit_s=1.0)

    assert ended is None
    assert time.monotonic() - started < 10


def test_a_process_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    assert run_program(["no_such_module_here"], tmp_path / "log", limit_s=30.0) == 1
    assert "No module named no_such_module_here" in (tmp_path / "log").read_text(encoding="utf-8")


def test_folders_for_weights_are_removed_whatever_happens_and_a_given_one_is_kept(tmp_path: Path) -> None:
    def fail() -> None:
        with weights_folder(None) as weights:
            made.extend(Path(folder) for folder in weights.candidates.split(":"))
            (made[0] / "transformer-00.safetensors").write_bytes(b"0")
            raise KeyboardInterrupt

    made: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    with weights_folder(tmp_path / "kept") as weights:
        assert weights.folder is None

    assert made and not [folder for folder in made if folder.exists()]
    assert (tmp_path / "kept").is_dir()
