import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from residency.cli import VERBS, WRITING

COMMAND = [sys.executable, "-m", "residency"]


@pytest.mark.parametrize(("shell", "mark"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --")])
def test_the_script_of_a_shell_is_generated(shell: str, mark: str, run: Callable[..., Any]) -> None:
    done = run("completion", shell)

    assert done.code == 0
    assert mark in done.out and f"_RESIDENCY_COMPLETE={shell}_complete" in done.out


def test_the_script_is_one_that_bash_reads(run: Callable[..., Any]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    script = run("completion", "bash").out

    assert subprocess.run([bash, "-n"], input=script, text=True, check=False).returncode == 0


def test_another_shell_is_usage(run: Callable[..., Any]) -> None:
    assert run("completion", "tcsh").code == 2


def completed(words: str, environment: dict[str, str]) -> list[str]:
    """What bash is offered for the last word."""
    asked = {
        **environment,
        "_RESIDENCY_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(COMMAND, env=asked, capture_output=True, text=True, check=True)
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def test_verbs_and_options_are_completed(clean_environment: dict[str, str]) -> None:
    assert completed("residency ", clean_environment) == [*VERBS, *WRITING]
    assert completed("residency qua", clean_environment) == ["quarantine"]
    assert completed("residency quarantine cl", clean_environment) == ["clear"]
    assert "--until-state" in completed("residency log --un", clean_environment)
    assert "rolled-back" in completed("residency log --until-state ", clean_environment)


def test_streams_are_completed_from_the_journal(committed: Any, clean_environment: dict[str, str]) -> None:
    committed.start(stream="other", epoch="epoch-9")
    environment = {**clean_environment, "RESIDENCY_JOURNAL": str(committed.path)}

    assert completed("residency log --stream ", environment) == ["other", "worker"]
    assert completed("residency log --stream w", environment) == ["worker"]
    assert completed("residency log --stream ", {**environment, "RESIDENCY_JOURNAL": "/nowhere"}) == []
