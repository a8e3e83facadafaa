import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from residency import errors, settings
from residency.cli import EXIT_CODES, VERBS, WRITING
from residency.cli import residency as group
from residency.gpu.placement import RESIDENT, Placement
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
from residency.statemachine.diagram import mermaid

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
BENCHMARK, BENCHMARK_TEST = "python -m benchmarks.request_time", "tests/benchmarks/test_request_time.py"
REPLICAS = "http://127.0.0.1:8000 http://127.0.0.1:8001"

# Commands that cannot run inside a test: where they run instead, and what that file must contain.
COVERED_ELSEWHERE = {
    "make demo": (".ci/run", "make demo"),
    "make test": (".ci/run", "make test"),
    "make check": (".ci/run", "make check"),
    "make setup": ("Makefile", "test: $(STAMP)"),
    "make test-gpu": ("Makefile", "test-gpu: $(STAMP)"),
    "make wheel": ("tests/test_packaging.py", "def test_the_wheel_runs_outside_the_checkout"),
    "make test PYTHON=python3.12 VENV=.venv-3.12": ("Makefile", "make test PYTHON=python3.12 VENV=.venv-3.12"),
    "make test-gpu VENV_FLAGS=--system-site-packages": ("Makefile", "VENV_FLAGS=--system-site-packages"),
    "python -m residency.demo_story --journal .demo/journal.db --device cuda --pipeline flux": (
        "Makefile",
        "python -m residency.demo_story --journal .demo/journal.db",
    ),
    "residency explain 1 --journal .demo/journal.db": ("residency/demo_story.py", '["explain", str(first["round"])]'),
    f"{BENCHMARK} --list-shards": (BENCHMARK_TEST, 'run("--list-shards")'),
    f"{BENCHMARK} --shard flux --output flux.json": ("tests/benchmarks/test_parts.py", "SHARDS.values()"),
    f"{BENCHMARK} --shard flux-peers-24 --output flux-peers-24.json": (BENCHMARK_TEST, '"flux-peers-24"'),
    f"{BENCHMARK} --merge flux.json flux-peers-24.json --output all.json --plot time.svg": (BENCHMARK_TEST, "--merge"),
    f"{BENCHMARK} --merge all.json --output all.json --compare older.json --timeline worst.svg": (
        BENCHMARK_TEST,
        "--compare",
    ),
    f"{BENCHMARK} --device cpu --pipeline small --caps 48MiB --requests 2 --output small.json": (
        BENCHMARK_TEST,
        '"--device", "cpu", "--pipeline", "small"',
    ),
    **dict.fromkeys(
        (
            "pip install 'residency[http]'",
            f"residency fleet status {REPLICAS}",
            f"residency fleet validate {REPLICAS} --concurrency 1 --timeout 600",
            f"residency fleet calibrate {REPLICAS} --token-file control.token --json",
            f"residency fleet roll-back {REPLICAS}",
        ),
        ("tests/replicas/test_document.py", "def test_every_command_of_the_document_runs"),
    ),
    "residency log --follow": ("tests/residency/test_cli_process.py", "def test_follow_prints_what_comes"),
}


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def each_document(documents: tuple[Path, ...] = DOCUMENTS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", documents, ids=lambda document: document.name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a journal of twelve events: one committed round, and a worker that served."""
    placement = Placement(components={"vae": RESIDENT})
    transitions: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("measuring", "planned", "plan", {"placement": placement.digest, "source": "calibration", "inputs": {}}),
        ("planned", "applied", "apply", {"placement": placement.digest, "num_effects": 0}),
        ("applied", "validating", "validate", {}),
        ("validating", "committed", "commit", {"placement": placement.digest}),
    )
    started = {"fingerprint": {}, "initial_placement": placement.digest}
    served = Draft(type=EventType.SERVING, round=1, payload={"placement": placement.digest, "decision": "committed"})
    journal = Journal.open(tmp_path / "residency.db")
    journal.append(
        [
            Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(placement.to_bytes(),)),
            *(
                Draft(
                    type=EventType.TRANSITION, round=1, payload=payload, from_state=old, to_state=new, trigger=trigger
                )
                for old, new, trigger, payload in transitions
            ),
            *[served] * 7,
        ],
        stream="worker",
        epoch="epoch-1",
        witness=True,
    )
    journal.close()
    yield tmp_path


@each_document()
def test_every_command_in_the_documents_runs(document: Path, folder: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RESIDENCY_", "SGLANG_"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**kept, "PATH": path, "RESIDENCY_JOURNAL": "residency.db", "XDG_STATE_HOME": str(folder / "state")}
    for block in blocks(document, "sh"):
        commands = [line for line in block.splitlines() if line and line not in COVERED_ELSEWHERE]
        script = "\n".join(commands)

        done = subprocess.run(
            ["sh", "-euc", script], cwd=folder, env=environment, check=False, capture_output=True, text=True
        )

        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", COVERED_ELSEWHERE)
def test_commands_covered_elsewhere_are_still_documented_and_covered(command: str) -> None:
    documented = [line for document in DOCUMENTS for block in blocks(document, "sh") for line in block.splitlines()]
    file, text = COVERED_ELSEWHERE[command]

    assert command in documented
    assert text in (ROOT / file).read_text(encoding="utf-8")


def test_the_picture_in_the_readme_is_the_generated_one() -> None:
    assert blocks(ROOT / "README.md", "mermaid") == [mermaid()]


def test_the_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert text.startswith("# residency\n\n```sh\nmake demo\nmake test\n```\n")


def test_adoption_takes_under_fifteen_lines_of_names_that_exist() -> None:
    import residency

    adoption, *others = blocks(ROOT / "README.md", "python")
    used = {
        node.attr
        for block in (adoption, *others)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "residency"
    }

    assert len([line for line in adoption.splitlines() if line.strip()]) < 15
    assert used <= set(residency.__all__)


@each_document()
def test_python_in_the_documents_is_python(document: Path) -> None:
    for block in blocks(document, "python"):
        ast.parse(block)


@each_document()
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))

    missing = [one for one in targets if "://" not in one and not (document.parent / one).exists()]
    assert not missing


@each_document()
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|residency|statemachine|journal|effects|gpu|docs)/[\w/.-]+\.(?:py|md))", text))

    missing = [one for one in sorted(named) if not (ROOT / one).exists()]
    assert not missing


def test_every_guarantee_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    numbered = re.split(r"^### G\d+\. ", text, flags=re.MULTILINE)[1:]
    numbers = [int(number) for number in re.findall(r"^### G(\d+)\. ", text, re.MULTILINE)]

    assert numbers == list(range(1, len(numbered) + 1))
    for guarantee in numbered:
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", guarantee)
        assert tests, f"no test is named for: {guarantee.splitlines()[0]}"
        for file, name in tests:
            assert (ROOT / file).exists(), file
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") if name else True, name


def test_every_keyword_of_attach_in_the_documents_exists() -> None:
    from residency.manager import attach

    calls = [
        node
        for document in DOCUMENTS
        for block in blocks(document, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "attach"
    ]
    known = set(inspect.signature(attach).parameters)

    assert len(calls) >= 2
    assert not [one.arg for call in calls for one in call.keywords if one.arg not in known]


def test_every_verb_is_in_the_readme_and_has_help() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    for name in VERBS | WRITING:
        command = group.get_command(click.Context(group), name)
        assert name == "demo" or f"residency {name}" in text, name
        assert command is not None and command.help, name


def test_every_variable_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    source = Path(settings.__file__).read_text(encoding="utf-8")
    read = {*settings.KILL_SWITCHES, *re.findall(r'environ(?:\.get\(|\[)"(\w+)"', source)}

    assert {"RESIDENCY_DISABLE", "RESIDENCY_JOURNAL", "RESIDENCY_NAME", "NO_COLOR"} <= read
    assert not [name for name in read if f"`{name}`" not in text]


def test_exit_codes_are_the_same_in_help_readme_and_errors() -> None:
    table = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    in_readme = {int(code) for row in table for code in row.split(",")}
    in_help = {int(code) for code in re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE)}
    of_errors = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.ResidencyError)
    }

    assert in_readme == in_help
    assert of_errors <= in_help


def test_make_help_lists_the_targets_that_contributing_explains() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

    assert {"setup", "demo", "test", "check", "test-gpu", "wheel"} <= targets
    assert not [target for target in set(re.findall(r"`make ([a-z-]+)", text)) if target not in targets]
