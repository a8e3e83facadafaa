import os
import pty
import re
import resource
import select
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residency.cli import VERBS, WRITING
from residency.journal.events import Draft, EventType

READING = ["at", "rounds", "log", "placement", "explain", "stats", "replay", "verify", "export"]
# Every verb that only reads, as it is called on a journal with one round.
CALLS = [
    *((verb,) for verb in READING if verb != "export"),
    ("show", "1"),
    ("diff", "1", "1"),
    ("quarantine", "list"),
    ("replay", "--dry-run"),
    ("prune", "--dry-run"),
]
COMMAND = [sys.executable, "-m", "residency"]


@pytest.mark.parametrize("verb", [*READING, "show"])
def test_no_journal_at_the_path_is_exit_code_3(verb: str, run: Callable[..., Any], tmp_path: Path) -> None:
    done = run(verb, *(["1"] if verb == "show" else []), "--journal", "missing.db")

    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: journal ") and "missing.db: does not exist; " in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_is_exit_code_3(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("rounds", "--journal", str(tmp_path))

    assert (done.code, done.err.count("\n")) == (3, 1)


def test_a_file_that_is_no_journal_is_exit_code_5_and_untouched(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("not a database")

    done = run("rounds", "--journal", "notes.db")

    assert (done.code, done.err.count("\n")) == (5, 1)
    assert (tmp_path / "notes.db").read_text() == "not a database"


def test_a_journal_of_a_newer_format_is_exit_code_4(committed: Any, run: Callable[..., Any]) -> None:
    committed.journal.close()
    connection = sqlite3.connect(committed.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    done = run("rounds", "--journal", "journal.db")

    assert done.code == 4
    assert "format 99 is newer than this program's" in done.err


def test_another_kind_of_database_is_exit_code_3(run: Callable[..., Any]) -> None:
    done = run("rounds", "--journal", "postgresql://host/fleet")

    assert (done.code, done.err.count("\n")) == (3, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("log", "--frobnicate"),
        ("log", "-n", "-1"),
        ("log", "-n", "many"),
        ("log", "--since", "someday"),
        ("show",),
        ("show", "zero"),
        ("show", "0"),
        ("placement", "--at", "someday"),
        ("rounds", "--stream", "nobody"),
        ("rounds", "--journal", ""),
        ("demo", "--vram", "24"),
        ("demo", "--device", "tpu"),
        ("demo", "--crash-at", "committed"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_one_line(
    arguments: tuple[str, ...], committed: Any, run: Callable[..., Any]
) -> None:
    done = run(*arguments, environment={"RESIDENCY_JOURNAL": "journal.db"})

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["rounds", "log", "placement", "explain"])
def test_several_streams_without_a_choice_are_listed(verb: str, committed: Any, run: Callable[..., Any]) -> None:
    committed.start(stream="other worker", epoch="epoch-9")

    unclear = run(verb, "--journal", "journal.db")
    chosen = run(verb, "--journal", "journal.db", "--stream", "worker")

    assert unclear.code == 2
    assert "2 streams, name one with --stream: other worker, worker" in unclear.err
    assert chosen.code == 0


@pytest.mark.parametrize("verb", ["at", "rounds", "log", "placement", "explain", "replay"])
def test_a_journal_without_events_is_said_to_be_empty(verb: str, story: Any, run: Callable[..., Any]) -> None:
    done = run(verb, "--journal", "journal.db", "--json")

    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.code == (1 if verb in ("at", "placement", "explain") else 0)


def test_the_variable_names_the_journal_and_the_option_wins(committed: Any, run: Callable[..., Any]) -> None:
    by_variable = run("rounds", environment={"RESIDENCY_JOURNAL": "journal.db"})
    by_option = run("rounds", "--journal", "journal.db", environment={"RESIDENCY_JOURNAL": "missing.db"})
    by_default = run("rounds")

    assert (by_variable.code, by_option.code, by_default.code) == (0, 0, 3)
    assert "state/residency/journal.db" in by_default.err


def test_reading_verbs_load_neither_torch_nor_sqlalchemy(
    committed: Any, clean_environment: dict[str, str], tmp_path: Path
) -> None:
    verbs = [*map(list, CALLS), ["graph"], ["completion", "bash"], ["export", "-o", "export.jsonl"]]
    verbs.remove(["prune", "--dry-run"])  # prunes with what writes
    code = (
        "import sys; from residency.cli import main\n"
        f"codes = [main(verb) for verb in {verbs!r}]\n"
        "print(codes, sorted({'torch', 'sqlalchemy', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**clean_environment, "RESIDENCY_JOURNAL": "journal.db"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )

    assert done.stderr.splitlines()[-1] == f"{[0] * len(verbs)} []"


def test_reading_changes_nothing_in_the_journal(crashed: Any, run: Callable[..., Any]) -> None:
    crashed.journal.close()
    before = contents(crashed.path.parent)

    codes = [run(*call, "--journal", "journal.db").code for call in CALLS]

    assert codes == [0] * len(codes)
    # Not even a -wal or a -shm is made beside it.
    assert contents(crashed.path.parent) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("suffixes", [("", "-wal"), ("", "-wal", "-shm")], ids="+".join)
def test_a_crashed_journal_is_looked_at_as_it_is(
    suffixes: tuple[str, ...], crashed: Any, run: Callable[..., Any]
) -> None:
    # Its worker holds it open, as it stood when a machine died: what was written last is in the -wal alone.
    evidence = crashed.path.parent / "evidence"
    evidence.mkdir()
    for suffix in suffixes:
        shutil.copyfile(f"{crashed.path}{suffix}", evidence / f"journal.db{suffix}")
    assert (evidence / "journal.db-wal").stat().st_size > 0
    before = contents(evidence)

    results = [run(*call, "--journal", "evidence/journal.db") for call in CALLS]

    assert [done.code for done in results] == [0] * len(CALLS)
    assert run("log", "--json", "--journal", "evidence/journal.db").json()[-1]["type"] == "effect.intent"
    after = contents(evidence)
    assert (
        {**after, "journal.db-shm": b""} == {**before, "journal.db-shm": b""} if "-shm" in suffixes else after == before
    )


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_what_is_piped_has_neither_colours_nor_boxes(
    call: tuple[str, ...], crashed: Any, run: Callable[..., Any]
) -> None:
    done = run(*call, "--journal", "journal.db")

    assert done.out.isascii() and done.err.isascii()
    assert "\x1b" not in done.out + done.err


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_reading_verb_speaks_json(call: tuple[str, ...], crashed: Any, run: Callable[..., Any]) -> None:
    done = run(*call, "--json", "--journal", "journal.db")

    assert done.code == 0
    assert all(isinstance(one, dict) for one in done.json())


def test_the_reader_of_a_pipe_may_go_away(committed: Any, clean_environment: dict[str, str]) -> None:
    for _ in range(5):
        committed.commit(2)
    reading, writing = os.pipe()
    os.close(reading)

    with os.fdopen(writing, "wb") as closed:
        command = [*COMMAND, "log", "--json", "--journal", str(committed.path)]
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False, env=clean_environment
        )

    assert (done.returncode, done.stderr) == (141, "")


def test_follow_prints_what_comes_and_ends_by_ctrl_c(committed: Any, clean_environment: dict[str, str]) -> None:
    command = [*COMMAND, "log", "--follow", "--json", "-n", "1", "--journal", str(committed.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            first = process.stdout.readline()
            stopped = Draft(type=EventType.STOPPED, round=0, payload={"reason": "exit", "signal": None})
            committed.write(stopped)
            ready, _, _ = select.select([process.stdout], [], [], 10)
            second = process.stdout.readline() if ready else b""
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=10)
        finally:
            process.kill()
        assert b'"position":9' in first
        assert b'"position":10' in second and b'"stopped"' in second
        assert (code, process.stderr.read()) == (130, b"")


def on_a_terminal(arguments: list[str], environment: dict[str, str], *, columns: int) -> str:
    """Run a verb on a terminal of so many columns and return what it shows."""
    main, side = pty.openpty()
    environment = {**environment, "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=side, stderr=side, stdin=side, env=environment)
    os.close(side)
    shown = b""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(main)
    process.wait(timeout=10)
    return shown.decode()


def test_a_terminal_gets_colour_and_rows_no_wider_than_itself(
    committed: Any, clean_environment: dict[str, str]
) -> None:
    shown = on_a_terminal(["log", "--journal", str(committed.path)], clean_environment, columns=80)
    rounds = on_a_terminal(["rounds", "--journal", str(committed.path)], clean_environment, columns=80)

    assert max(map(len, shown.splitlines())) <= 80
    assert "…" in shown
    assert "\x1b[32m" in rounds


def test_what_the_encoding_cannot_show_is_escaped(
    story: Any, gate: Callable[..., None], clean_environment: dict[str, str]
) -> None:
    story.start()
    gate(story, reason="warmup-failed", detail="n\u00fcscht geht \u2192 nix")
    command = [*COMMAND, "log", "--journal", str(story.path)]

    # click sees to ASCII by itself.
    environment = {**clean_environment, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, encoding="latin-1", check=True, env=environment)

    assert "n\u00fcscht geht \\u2192 nix" in done.stdout


def test_no_color_takes_the_colour_away(committed: Any, clean_environment: dict[str, str]) -> None:
    environment = {**clean_environment, "NO_COLOR": "1"}

    assert "\x1b" not in on_a_terminal(["rounds", "--journal", str(committed.path)], environment, columns=80)


def test_no_verb_at_all_prints_the_help(run: Callable[..., Any]) -> None:
    bare, asked = run(), run("--help")

    assert (bare.code, bare.out, bare.err) == (0, asked.out, "")


@pytest.mark.parametrize("missing", ["diffusers", "transformers"])
def test_the_demo_says_in_one_line_which_package_is_missing(
    missing: str, clean_environment: dict[str, str], tmp_path: Path
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from residency.cli import main; sys.exit(main(['demo']))"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=clean_environment
    )

    expected = f"error: the demo needs {missing}, which is not installed; pip install 'residency[diffusers]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_help_names_every_verb_and_every_exit_code(run: Callable[..., Any]) -> None:
    text = run("--help").out

    for verb in VERBS | WRITING:
        assert f"\n  {verb} " in text
    for code in ("0", "1", "2", "3", "4", "5", "70", "71", "72", "124", "130", "141"):
        assert re.search(rf"^ +{code}  +[a-z]", text, re.MULTILINE), code


@pytest.mark.parametrize("verb", [*VERBS, *WRITING, "quarantine list", "quarantine clear"])
def test_every_verb_explains_itself_and_its_exit_codes(verb: str, run: Callable[..., Any]) -> None:
    done = run(*verb.split(), "--help")

    assert done.code == 0
    assert len(done.out.splitlines()) > 4
    assert "Exit codes:" in done.out


def test_the_last_of_100_000_events_are_shown_within_300_ms(story: Any, clean_environment: dict[str, str]) -> None:
    note = Draft(type=EventType.GATED, round=0, payload={"reason": "busy", "detail": "one of many events"})
    for _ in range(50):
        story.journal.append([note] * 2_000, stream="worker", epoch="epoch-1")
    command = [*COMMAND, "log", "-n", "20", "--journal", str(story.path)]

    times, shown = [], ""
    for _ in range(5):
        took_s, shown = timed(command, clean_environment)
        times.append(took_s)

    assert len(shown.splitlines()) == 21
    assert min(times) < 0.3
    took_s, shown = timed([*COMMAND, "stats", "--journal", str(story.path)], clean_environment)
    assert "events    100000" in shown
    assert took_s < 3


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Run it, and return its time and its output.

    One thread that waits for nothing: the time on the processor is what a person waits on an idle machine.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, shown


def test_the_console_script_is_the_same_command(run: Callable[..., Any]) -> None:
    script = Path(sys.executable).with_name("residency")

    assert script.stat().st_mode & stat.S_IXUSR
    assert subprocess.run([script, "graph"], capture_output=True, text=True, check=True).stdout == run("graph").out
