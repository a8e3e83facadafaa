"""The verbs on a journal on a server: the same answers as on one in a file."""

from collections.abc import Callable
from typing import Any

import pytest

CALLS = [
    ("at", "12"),
    ("rounds",),
    ("log", "--after", "3"),
    ("log", "-n", "2"),
    ("show", "1"),
    ("placement", "--at", "4"),
    ("explain",),
    ("diff", "1", "1"),
    ("quarantine", "list"),
    ("replay", "--dry-run"),
]
# Drawn or measured anew for each journal.
OWN = {"event_id", "previous_hash", "hash", "causation", "pid", "first_position", "last_position"}


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in OWN}
    return [comparable(part) for part in value] if isinstance(value, list) else value


@pytest.fixture
def on_server(crashed: Any, database: Any) -> str:
    """The same story once more, in a database."""
    url: str = database.url(database.new_schema())
    story = type(crashed)(url)
    story.start()
    story.commit(1)
    story.serve()
    story.start(epoch="epoch-2", fingerprint={"torch": "2.13.0", "cap_bytes": 500 * 2**20})
    story.plan(2, epoch="epoch-2")
    story.intend(2, epoch="epoch-2")
    story.journal.close()
    return url


def test_every_reading_verb_answers_as_on_a_file(on_server: str, crashed: Any, run: Callable[..., Any]) -> None:
    for call in CALLS:
        server = run(*call, "--json", "--journal", on_server)
        file = run(*call, "--json", "--journal", "journal.db")

        assert (server.code, comparable(server.json())) == (file.code, comparable(file.json())), call


def test_stats_of_a_server_have_no_file(on_server: str, crashed: Any, run: Callable[..., Any]) -> None:
    server, whole = run("stats", "--json", "--journal", on_server).json()
    file, _ = run("stats", "--json", "--journal", "journal.db").json()

    assert server == file
    assert (whole["journal"]["events"], "file_bytes" in whole["journal"]) == (13, False)
    assert "password" not in whole["journal"]["location"]


def test_a_quarantine_is_cleared_on_a_server(on_server: str, run: Callable[..., Any]) -> None:
    done = run("quarantine", "clear", "--all", "--reason", "x", "--journal", on_server)

    assert (done.code, done.err) == (1, "nothing is held against any placement\n")


def test_a_server_makes_its_own_backups(on_server: str, run: Callable[..., Any]) -> None:
    done = run("backup", "copy.db", "--journal", on_server)

    assert (done.code, done.err.count("\n")) == (3, 1)
    assert run("verify", "--journal", on_server).code == 0


def test_a_server_is_exported_and_imported_into_a_file(on_server: str, run: Callable[..., Any]) -> None:
    assert run("export", "-o", "fleet.jsonl", "--journal", on_server).code == 0
    assert run("import", "fleet.jsonl", "--journal", "copy.db").code == 0
    assert run("log", "--json", "--journal", "copy.db").out == run("log", "--json", "--journal", on_server).out


def test_a_journal_is_imported_into_a_server_and_pruned_there(
    on_server: str, database: Any, run: Callable[..., Any]
) -> None:
    assert run("export", "-o", "fleet.jsonl", "--journal", on_server).code == 0
    other = database.url(database.new_schema())
    assert run("import", "fleet.jsonl", "--journal", other).code == 0
    assert run("log", "--json", "--journal", other).out == run("log", "--json", "--journal", on_server).out

    done = run("prune", "--keep-epochs", "1", "--journal", other)
    assert (done.code, done.err) == (0, "there is nothing to remove\n")
    assert run("verify", "--journal", other).code == 0
