import logging
from pathlib import Path

import pytest

from residency.errors import SettingsError, SizeError
from residency.settings import (
    KILL_SWITCHES,
    KillSwitch,
    allocator_settings,
    journal_location,
    kill_switch,
    num_local_ranks,
    parse_size,
    sentinel_path,
    sqlite_path,
    state_directory,
    wants_color,
    worker_name,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        *KILL_SWITCHES,
        "RESIDENCY_JOURNAL",
        "RESIDENCY_NAME",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        (" 1.5 gib ", 3 * 2**29),
        ("512MiB", 512 * 2**20),
        ("24GB", 24 * 10**9),
        ("8000000B", 8_000_000),
        ("0.1GiB", 107_374_182),
        ("1TiB", 2**40),
    ],
)
def test_a_size_with_a_unit_is_its_bytes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "value", ["24", "24G", "GiB", "", "-1GiB", "0GiB", "1e3MiB", "24 GiB or so", "nan GiB", 24, None, True]
)
def test_a_size_without_a_unit_is_refused_with_a_remedy(value: object) -> None:
    with pytest.raises(SizeError, match="--vram is .*write a size with its unit") as caught:
        parse_size(value, name="--vram")

    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", KILL_SWITCHES)
@pytest.mark.parametrize("word", ["", "0", "false", "no", "off", " OFF ", "False"])
def test_off_words_leave_the_kill_switch_off(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, word)

    assert kill_switch() is None


@pytest.mark.parametrize("name", KILL_SWITCHES)
@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "TRUE"])
def test_on_words_throw_the_kill_switch_without_a_warning(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, word)

    assert kill_switch() == KillSwitch(by=name, value=word)
    assert not caplog.records


@pytest.mark.parametrize("name", KILL_SWITCHES)
def test_an_unknown_word_pins_and_warns_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, f"maybe-{name}")
    caplog.set_level(logging.WARNING)

    first, second = kill_switch(), kill_switch()

    assert first == second == KillSwitch(by=name, value=f"maybe-{name}")
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} is 'maybe-{name}', which is neither on nor off; taken as on, write 1 or 0"
    ]


def test_the_kill_switch_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kill_switch()
    monkeypatch.setenv("RESIDENCY_DISABLE", "1")

    assert before is None
    assert kill_switch() is not None


def test_a_sentinel_throws_the_kill_switch(tmp_path: Path) -> None:
    sentinel = sentinel_path(str(tmp_path / "journal.db"))
    before = kill_switch(sentinel)
    sentinel.touch()

    assert before is None
    assert kill_switch(sentinel) == KillSwitch(by="sentinel", value=str(tmp_path.resolve() / "journal.db.disable"))


def test_the_sentinel_of_another_database_is_in_the_state_directory(tmp_path: Path) -> None:
    assert sentinel_path("postgresql://host/fleet") == tmp_path / "state" / "residency" / "disable"


@pytest.mark.parametrize("form", ["{path}", "sqlite:///{path}", "sqlite+pysqlite:///{path}"])
def test_a_sqlite_journal_has_one_path_however_it_is_written(form: str, tmp_path: Path) -> None:
    path = tmp_path.resolve() / "journal.db"

    assert sqlite_path(form.format(path=path)) == path


def test_the_journal_given_wins_over_the_variable_and_the_variable_over_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = journal_location()
    monkeypatch.setenv("RESIDENCY_JOURNAL", "from-variable.db")

    assert default == str(tmp_path / "state" / "residency" / "journal.db")
    assert journal_location() == "from-variable.db"
    assert journal_location("given.db") == "given.db"
    assert journal_location(tmp_path / "given.db") == str(tmp_path / "given.db")


def test_an_empty_journal_path_is_refused() -> None:
    with pytest.raises(SettingsError, match="path is empty"):
        journal_location("")


def test_a_relative_state_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")

    assert state_directory() == Path.home() / ".local" / "state" / "residency"


def test_the_name_given_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    without = worker_name()
    monkeypatch.setenv("RESIDENCY_NAME", "from-variable")

    assert without is None
    assert worker_name() == "from-variable"
    assert worker_name("given") == "given"


def test_the_newer_allocator_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    without = allocator_settings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "old:1")
    older = allocator_settings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "new:1")

    assert (without, older, allocator_settings()) == ("", "old:1", "new:1")


@pytest.mark.parametrize(("value", "expected"), [("", True), ("1", False), ("0", False)])
def test_no_color_takes_colour_away_whatever_its_value(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", value)

    assert wants_color() is expected


@pytest.mark.parametrize(("text", "number"), [(None, 1), ("4", 4), ("", 1), ("0", 1), ("many", 1), ("-2", 1)])
def test_the_launcher_says_how_many_processes_share_the_host(
    monkeypatch: pytest.MonkeyPatch, text: str | None, number: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert num_local_ranks() == number
