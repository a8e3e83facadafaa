"""The verb `fleet`: what it prints to people, to pipes and to programs, and what it ends with."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from benchmarks.fleet_replicas import Manager
from residency.cli import main
from residency.errors import ProcessPoisoned, RollbackFailed
from residency.statemachine.states import State

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "residency", "fleet"]


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def fleet(*arguments: str) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["fleet", *arguments])
    return Result(code, out.getvalue(), err.getvalue())


def test_the_status_is_a_table(servers: Any) -> None:
    url, other = servers.replica(Manager(digest="ab" * 32)), servers.replica()
    assert fleet("calibrate", other).code == 0

    done = fleet("status", url, other)

    heading, first, second, empty, merged = done.out.splitlines()
    assert heading.split() == ["URL", "READY", "STATE", "ROUND", "PLACEMENT", "DECISION", "REQUESTS"]
    assert first.split() == [url, "yes", "committed", "1", "abababababab", "committed", "-"]
    assert second.endswith("calibrate was committed in round 2")
    assert (done.code, empty, merged) == (0, "", "status: answered: 2 answered")


def test_an_outcome_is_a_table_with_its_reasons_and_plain_lines_of_progress(servers: Any) -> None:
    url, dead = servers.replica(), servers.dead()

    done = fleet("calibrate", url, dead)

    assert done.code == 1
    assert done.out.splitlines()[0].split() == ["URL", "OUTCOME", "ROUND", "STATE", "PLACEMENT", "WHY"]
    assert done.out.splitlines()[-1] == "calibrate: refused (mixed): 1 refused, 1 committed"
    assert f"{dead}  refused" in done.out and "connection-refused: no connection: " in done.out
    assert sorted(line[:4] for line in done.err.splitlines()) == ["1/2 ", "2/2 "]
    assert "\x1b" not in done.out + done.err


def test_json_is_a_line_a_replica_and_one_for_all(servers: Any) -> None:
    url, dead = servers.replica(), servers.dead()

    done = fleet("roll-back", url, dead, "--json")

    *replicas, merged = done.lines
    assert {one["url"]: (one["outcome"], one["fault"]) for one in replicas} == {
        url: ("rolled-back", None),
        dead: ("refused", "connection-refused"),
    }
    assert merged == {
        "merged": "refused",
        "verb": "roll_back",
        "mixed": True,
        "counts": {"refused": 1, "rolled-back": 1},
        "num_replicas": 2,
        "num_placements": 1,
        "interrupted": False,
    }
    assert (done.code, done.err) == (1, "")


@pytest.mark.parametrize(
    ("verb", "manager", "code"),
    [
        ("calibrate", Manager(), 0),
        ("calibrate", Manager(kept=True), 0),
        ("calibrate", Manager(state=State.ROLLED_BACK), 1),
        ("validate", Manager(pinned=True), 1),
        ("roll-back", Manager(), 0),
        ("roll-back", Manager(state=State.ROLLED_BACK), 1),
        ("calibrate", Manager(error=KeyError("x")), 6),
        ("calibrate", Manager(error=RollbackFailed(round_number=2, problems=())), 70),
        ("calibrate", Manager(error=ProcessPoisoned(round_number=2, problem="x")), 71),
    ],
)
def test_exit_codes_tell_the_worst(servers: Any, verb: str, manager: Manager, code: int) -> None:
    assert fleet(verb, servers.replica(manager)).code == code


def test_a_status_that_is_not_told_is_exit_code_6(servers: Any) -> None:
    assert fleet("status", servers.dead()).code == 6


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "worker:8000"),
        ("status", "http://worker", "--concurrency", "0"),
        ("status", "http://worker", "--concurrency", "100000"),
        ("status", "http://worker", "--timeout", "0"),
        ("status", "http://worker", "--timeout", "nan"),
        ("status", "http://worker", "--timeout", "1e9"),
        ("status", "http://worker", "--token-file", "missing"),
        ("status", "http://worker", "--ca-file", "missing"),
        ("status", "http://worker", "--again", "x"),
        ("calibrate", "--again", "missing"),
        ("restart", "http://worker"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_one_line(arguments: tuple[str, ...]) -> None:
    done = fleet(*arguments)

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


def test_the_token_comes_from_a_file_or_a_variable(
    servers: Any, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = servers.replica(token=token)
    (tmp_path / "token").write_text(f"{token}\n")

    refused = fleet("status", url)
    assert "unauthorized: HTTP 401: the request has no token" in refused.out
    assert fleet("status", url, "--token-file", str(tmp_path / "token")).code == 0
    monkeypatch.setenv("RESIDENCY_CONTROL_TOKEN", token)
    assert fleet("status", url).code == 0


def test_a_url_given_twice_is_asked_once_and_said_so(servers: Any) -> None:
    manager = Manager()
    url = servers.replica(manager)

    done = fleet("calibrate", url, f"{url}/", "--json")

    assert (manager.num_rounds, len(done.lines)) == (1, 2)
    assert "1 of the URLs are given more than once" in done.err


def test_what_a_replica_says_cannot_steer_a_terminal(servers: Any) -> None:
    manager = Manager(error=RollbackFailed(round_number=2, problems=("\x1b[2J\r\nevil",)))

    done = fleet("calibrate", servers.replica(manager))

    assert "\x1b" not in done.out and "\\x1b[2J\\r\\nevil" in done.out


def test_unknown_is_asked_again_with_the_output_of_the_first_call(servers: Any, tmp_path: Path) -> None:
    manager = Manager(hold=threading.Event())
    url, other = servers.replica(manager), servers.replica()
    first = fleet("calibrate", url, other, "--json", "--timeout", "2")
    assert first.code == 6
    (tmp_path / "first.jsonl").write_text(first.out)
    assert manager.hold is not None
    manager.hold.set()

    again = fleet("calibrate", "--again", str(tmp_path / "first.jsonl"), "--json")

    assert (again.code, manager.num_rounds) == (0, 1)
    assert [one.get("url") for one in again.lines] == [url, None]
    (tmp_path / "again.jsonl").write_text(again.out)
    assert fleet("calibrate", "--again", str(tmp_path / "again.jsonl")).code == 0
    assert fleet("validate", "--again", str(tmp_path / "first.jsonl")).code == 2


@pytest.mark.parametrize(
    "content", ["", "[1]\n", "{\n", '{"url": 1}\n', '{"url": "http://w", "outcome": "unknown", "request": 7}\n']
)
def test_what_was_never_printed_is_not_asked_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(content)

    done = fleet("calibrate", "--again", str(tmp_path / "lines"))

    assert done.code == (2 if content else 0)
    assert done.err.count("\n") == 1


def wait_for(manager: Manager) -> None:
    deadline_s = time.monotonic() + 60
    while manager.num_rounds == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_an_interrupt_says_what_is_known(servers: Any) -> None:
    held, done = Manager(hold=threading.Event()), Manager()
    urls = [servers.replica(done), servers.replica(held)]
    process = subprocess.Popen(
        [*COMMAND, "calibrate", *urls, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(held)
    # The other one's line is there before the end.
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    second, merged = (json.loads(line) for line in out.splitlines())
    assert (process.returncode, err) == (130, "")
    assert (first["url"], first["outcome"]) == (urls[0], "committed")
    assert (second["url"], second["outcome"], second["fault"]) == (urls[1], "unknown", "interrupted")
    assert second["request"]["epoch"] == held.epoch
    assert (merged["merged"], merged["interrupted"]) == ("unknown", True)
    assert held.hold is not None
    held.hold.set()


def test_on_a_terminal_one_line_tells_how_far_it_is_and_goes_away(servers: Any) -> None:
    url = servers.replica(Manager(round_s=0.2))
    controller, terminal = pty.openpty()
    process = subprocess.Popen([*COMMAND, "calibrate", url], stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    shown = b""
    with suppress(OSError):  # as a terminal says that nobody is at its other end
        while part := os.read(controller, 4096):
            shown += part
    os.close(controller)

    assert process.returncode == 0 and "committed" in out
    assert b"calibrate: 1 of 1 done" in shown
    assert shown.endswith(b"\r\x1b[K") and b"\n" not in shown


def test_without_the_http_library_the_verb_says_what_to_install_and_help_is_shown(tmp_path: Path) -> None:
    (tmp_path / "httpx2.py").write_text("raise ModuleNotFoundError(\"No module named 'httpx2'\", name='httpx2')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def call(*arguments: str) -> Any:
        return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, check=False)

    done, shown = call("status", "http://worker"), call("--help")

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'residency[http]'" in done.stderr
    assert shown.returncode == 0 and "calibrate" in shown.stdout


def test_no_other_verb_loads_the_http_library() -> None:
    code = (
        "import sys, residency.cli as cli; [cli.import_module(one) for one in cli.VERBS.values()]\n"
        "cli.main(['fleet', '--help']); cli.main(['graph'])\n"
        "print(sorted({'httpx', 'httpx2', 'httpcore2', 'torch', 'uvicorn', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"
