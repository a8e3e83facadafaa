"""The whole benchmark on the emulated device, as a stranger starts it. No figure here says anything about speed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIB = 2**20
CAP = "48MiB"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.request_time", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)


def folders_of_weights() -> set[Path]:
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {folder for place in places if place.is_dir() for folder in place.glob("request-time-*")}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The smallest run there is: link, all-resident, and ours at one cap under which the weights do not fit."""
    folder, before = tmp_path_factory.mktemp("results"), folders_of_weights()
    options = ["--device", "cpu", "--pipeline", "small", "--caps", CAP, "--requests", "2"]
    done = run(*options, "--output", str(folder / "small.json"), "--plot", str(folder / "small.svg"))
    assert folders_of_weights() == before, "the weights were not removed"
    return folder, done


@pytest.fixture
def rows(measured: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """The rows of that run by name."""
    folder, done = measured
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((folder / "small.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in document["runs"][0]["rows"]}


def test_a_run_on_the_emulated_device_says_that_it_shows_no_speed(
    measured: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = measured

    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "no figure says anything about speed" in done.stdout
    assert f"| ours@{CAP} |" in done.stdout
    assert (folder / "small.svg").read_text(encoding="utf-8").startswith("<svg")


def test_every_mode_ran_in_a_process_of_its_own_under_its_cap(rows: dict[str, Any]) -> None:
    ours = rows[f"ours@{CAP}"]

    assert list(rows) == ["link", "weights", "resident", f"ours@{CAP}"]
    assert not [row["error"] for row in rows.values() if "error" in row]
    assert ours["device"]["cap_bytes"] == ours["cap_bytes"] == 48 * MIB
    assert ours["peaks"]["reserved_peak_bytes"] <= 48 * MIB < rows["resident"]["peaks"]["reserved_peak_bytes"]
    assert rows["resident"]["total_bytes"] == rows["weights"]["weights"]["total_bytes"] > 48 * MIB


def test_ours_gives_the_output_of_all_resident_and_copies_nothing_back(rows: dict[str, Any]) -> None:
    ours, resident = rows[f"ours@{CAP}"], rows["resident"]

    assert ours["digest"] == resident["digest"] == resident["cold_digest"] == ours["cold_digest"]
    assert ours["is_finite"]
    assert ours["to_device_bytes"] > 0
    assert (ours["to_host_bytes"], resident["to_device_bytes"]) == (0, 0)


def test_the_placement_measured_is_the_one_planned_and_its_bounds_are_told(rows: dict[str, Any]) -> None:
    ours = rows[f"ours@{CAP}"]

    assert ours["record"]["placement_digest"] == ours["plan"]["placement_digest"]
    assert 0 < ours["plan"]["best_bound_ns"] <= ours["plan"]["bound_ns"]
    assert ours["median_s"] >= 0.99 * ours["plan"]["bound_ns"] / 1e9
    assert ours["setup_s"] > 0 and ours["cold_s"] > 0
    assert len(ours["samples_s"]) == ours["num_requests"] == 2
    assert ours["host"]["anonymous_bytes"] > 0


def test_results_are_merged_and_compared_without_a_device(
    measured: tuple[Path, subprocess.CompletedProcess[str]], rows: dict[str, Any], tmp_path: Path
) -> None:
    results, merged = measured[0] / "small.json", tmp_path / "merged.json"

    done = run("--merge", str(results), str(results), "--output", str(merged), "--compare", str(results))

    assert done.returncode == 0, done.stderr
    assert len(json.loads(merged.read_text(encoding="utf-8"))["runs"]) == 1
    assert f"ours@{CAP} | {rows[f'ours@{CAP}']['median_s']:.3f}" in done.stdout
    assert "equal within noise" in done.stdout


def test_shards_are_listed_and_a_file_that_is_no_result_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")

    listed, refused = run("--list-shards"), run("--merge", str(tmp_path / "other.json"))

    assert "flux-peers-24" in listed.stdout
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
