"""What docs/fleet.md shows is run: its commands against replicas, its programs as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.fleet_replicas import Manager, keep_port
from residency.errors import RollbackFailed
from residency.fleet import FleetClient
from residency.http_app import PATH
from residency.statemachine.replicas import Fault, ReplicaOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "fleet.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
WAIT_S = 60.0
URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_every_command_of_the_document_runs(servers: Any, folder: Path) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    urls = dict(zip(URLS, (servers.replica(Manager()) for _ in URLS), strict=True))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    num_run = 0
    for line in lines:
        if line.startswith("pip install"):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert "http" in extras["optional-dependencies"]
            continue
        command = line
        for shown, real in urls.items():
            command = command.replace(shown, real)

        done = subprocess.run(["sh", "-euc", command], check=False, capture_output=True, text=True, env=environment)

        num_run += line.startswith("residency fleet")
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert num_run >= 4
    assert len((folder / "control.token").read_text().strip()) >= 32


def test_the_app_is_mounted_as_shown(servers: Any) -> None:
    pytest.importorskip("starlette")
    (program,) = [one for one in blocks("python") if "Mount(" in one]
    names: dict[str, Any] = {"manager": Manager()}

    exec(program, names)  # noqa: S102 - it is our own document

    report = FleetClient([f"{servers.serve(names['app'])}/residency"]).calibrate()
    assert report.merged.outcome is ReplicaOutcome.COMMITTED


def test_the_app_is_served_alone_as_shown_and_ends_with_the_exit_code() -> None:
    kept = keep_port()
    port = kept.getsockname()[1]
    (program,) = [one for one in blocks("python") if "def serve(" in one]
    assert "port=8000" in program
    names: dict[str, Any] = {}
    exec(program.replace("port=8000", f"port={port}, log_level='critical'"), names)  # noqa: S102 - it is our own document
    ended: list[Any] = []

    def serve() -> None:
        try:
            names["serve"](Manager(error=RollbackFailed(round_number=2, problems=("x",))))
        except SystemExit as end:
            ended.append(end.code)

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            httpx2.get(f"{url}{PATH}")
            break
        except httpx2.ConnectError:
            time.sleep(0.01)
    report = FleetClient([url], answer_s=WAIT_S).calibrate()
    thread.join(WAIT_S)
    kept.close()

    assert report.merged.outcome is ReplicaOutcome.ROLLBACK_FAILED
    assert ended == [70]


def test_the_client_is_used_as_shown(servers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [one for one in blocks("python") if "FleetClient" in one]
    urls = [servers.replica() for _ in URLS]
    for shown, real in zip(URLS, urls, strict=True):
        assert shown in program
        program = program.replace(shown, real)

    exec(program, {})  # noqa: S102 - it is our own document

    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("committed False", "True")


def test_every_fault_and_every_outcome_is_explained() -> None:
    words = set(re.findall(r"`([a-z-]+)`", TEXT))

    assert {one.value for one in Fault} <= words
    assert {one.value for one in ReplicaOutcome} - {"answered"} <= words
