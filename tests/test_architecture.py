import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("residency", "statemachine", "journal", "effects", "gpu")
# Rooms inside of them.
ROOMS = ("residency/cli", "statemachine/planner")

# Folder -> the folders it may import from. residency/errors.py is for everybody.
ARROWS = {
    "residency": {"residency", "statemachine", "journal", "effects", "gpu"},
    "statemachine": {"statemachine", "journal", "effects", "gpu"},
    "journal": {"journal"},
    "effects": {"effects", "gpu"},
    "gpu": {"gpu"},
}
# Values: no torch, directly or through others, so that planning and reading a journal never load it.
VALUE_MODULES = {
    "residency.gpu.placement",
    "residency.gpu.records",
    "residency.gpu.specs",
    "residency.gpu.workload",
    "residency.effects.spec",
}


FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

# (file, what it imports inside a function): each would make a verb or a bare import pay for torch, for a server's
# driver or for HTTP, or must be silenced first.
DEFERRED = {
    ("journal/reader.py", "residency.journal.pg_reader"),
    ("journal/store.py", "residency.journal.pg_store"),
    ("residency/__init__.py", "importlib"),
    ("residency/cli/fleet.py", "residency.fleet"),
    ("residency/cli/host.py", "residency.demo"),
    ("residency/cli/host.py", "residency.doctor"),
    ("residency/demo.py", "residency.demo_pipeline"),
    ("residency/doctor.py", "residency.gpu.host_memory"),
    ("residency/doctor.py", "torch"),
}
PUBLIC_NAMES = {
    "ComponentPlacement",
    "ControlApp",
    "Decision",
    "HostTier",
    "Manager",
    "Mode",
    "Placement",
    "Policy",
    "RankLimits",
    "Ranks",
    "Report",
    "ResidencyError",
    "Workload",
    "attach",
    "limit_device",
}


def sources() -> list[Path]:
    # Only the real folders: residency/<folder> are links to them.
    return sorted(path for folder in (*FOLDERS, *ROOMS) for path in (ROOT / folder).glob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = parts[1:] if parts[0] == "residency" else parts
    return ".".join(("residency", *(part for part in inside if part != "__init__")))


def home_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.module is not None
    # `from residency.gpu import placement` imports a module, too.
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path, *, run_time_only: bool = False) -> Iterator[str]:
    """Every imported module, in functions and `import_module("...")` included."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree_of(path)):
        if run_time_only and isinstance(node, ast.If) and is_type_checking(node):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from modules_of(node)
        elif (named := deferred_by_name(node)) is not None:
            yield named


def deferred_by_name(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    argument = node.args[0]
    if called != "import_module" or not isinstance(argument, ast.Constant):
        return None
    return str(argument.value)


def folder_of(module: str) -> str | None:
    """The folder of ours that a module lives in; None for anything else and for the errors."""
    parts = module.split(".")
    if parts[0] != "residency" or module.startswith("residency.errors"):
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "residency"


each_source = pytest.mark.parametrize("path", sources(), ids=name_of)


@each_source
def test_imports_follow_the_arrows(path: Path) -> None:
    wrong = {
        module for module in imports(path) if (folder := folder_of(module)) and folder not in ARROWS[home_of(path)]
    }

    assert not wrong


@pytest.mark.parametrize("path", sorted((ROOT / "statemachine").rglob("*.py")), ids=name_of)
def test_the_state_machine_knows_only_values_of_the_gpu(path: Path) -> None:
    ours = {module for module in imports(path, run_time_only=True) if folder_of(module) == "gpu"}

    wrong = {
        module
        for module in ours
        if not any(module == value or module.startswith(f"{value}.") for value in VALUE_MODULES)
    }
    assert not wrong


@each_source
def test_third_party_packages_stay_where_they_belong(path: Path) -> None:
    name, folder = name_of(path), home_of(path)
    packages = {module.split(".")[0] for module in imports(path)}
    demo = path.stem.startswith("demo") and folder == "residency"

    allowed_torch = folder in ("effects", "gpu") and module_of(path) not in VALUE_MODULES or demo
    if ("torch" in packages) and (name, "torch") not in DEFERRED:
        assert allowed_torch, "torch belongs to effects/ and gpu/, not to values"
    if packages & {"diffusers", "transformers"}:
        assert demo or name == "gpu/adapters.py"
    if "sqlalchemy" in packages:
        assert folder == "journal"
    if packages & {"sqlite3", "pysqlite3"}:
        assert name == "journal/sqlite.py"
    if "httpx2" in packages:
        assert name in ("residency/fleet_exchange.py", "residency/fleet_replica.py", "residency/fleet.py")
    if "psycopg" in packages:
        assert name == "journal/postgresql.py"
    if "transitions" in packages:
        assert name == "statemachine/machine.py"
    if "click" in packages:
        assert name.startswith("residency/cli/") or demo or name == "residency/rendering.py"


@each_source
def test_only_settings_reads_the_environment(path: Path) -> None:
    readers = {"environ", "getenv", "environb", "putenv", "getenvb"}
    found = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in readers)
        or (isinstance(node, ast.Name) and node.id in readers)
    }

    assert not found or name_of(path) == "residency/settings.py"


@each_source
def test_files_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX]

    assert lines <= FILE_LINES_MAX
    assert not long


@each_source
def test_modules_say_what_they_own(path: Path) -> None:
    docstring = ast.get_docstring(tree_of(path))

    assert docstring, "a module opens with a sentence on what it owns"


@each_source
def test_imports_are_absolute_and_named(path: Path) -> None:
    froms = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]

    assert not [node.lineno for node in froms if node.level], "no relative imports"
    assert not [node.lineno for node in froms if any(alias.name == "*" for alias in node.names)], "no star imports"


@each_source
def test_imports_inside_functions_are_the_listed_ones(path: Path) -> None:
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [node for function in functions for node in ast.walk(function)]
    statements = [m for node in inner if isinstance(node, ast.Import | ast.ImportFrom) for m in modules_of(node)]
    named = [module for node in inner if (module := deferred_by_name(node)) is not None]
    allowed = {module for file, module in DEFERRED if file == name_of(path)}

    wrong = {
        module for module in (*statements, *named) if module not in allowed and module.split(".")[0] not in allowed
    }
    assert not wrong


def test_every_listed_deferred_import_is_still_made() -> None:
    missing = {(file, module) for file, module in DEFERRED if module not in set(imports(ROOT / file))}

    assert not missing


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_each_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "residency" / folder

    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", sorted(VALUE_MODULES | {module_of(p) for p in (ROOT / "statemachine").rglob("*.py")})
)
def test_values_and_the_state_machine_load_no_torch(module: str) -> None:
    assert "torch" not in loaded_after(f"import {module}")


def test_importing_residency_loads_nothing_of_weight() -> None:
    loaded = loaded_after("import residency")

    assert not loaded & {"torch", "sqlalchemy", "transitions", "msgspec", "click"}


def test_the_command_line_loads_neither_torch_nor_sqlalchemy() -> None:
    verbs = "import residency.cli; [residency.cli.import_module(name) for name in residency.cli.VERBS.values()]"
    loaded = loaded_after(verbs)

    assert not loaded & {"torch", "sqlalchemy", "diffusers", "transformers", "httpx2", "uvicorn"}


def test_public_names_are_pinned_and_can_be_imported() -> None:
    import residency

    assert set(getattr(residency, "__all__", ())) == PUBLIC_NAMES
    assert all(getattr(residency, name) is not None for name in PUBLIC_NAMES)
