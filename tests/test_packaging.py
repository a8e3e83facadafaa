import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("residency", "statemachine", "journal", "effects", "gpu")
PACKAGES = ("residency", *(f"residency.{folder}" for folder in FOLDERS[1:]))


def call(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays as it is, with the build tools of this environment."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        # The links in residency/ are left out: the wheel must not rely on them.
        skipped = FOLDERS if folder == "residency" else ()
        copytree(ROOT / folder, source / folder, ignore=ignore_patterns("__pycache__", *skipped))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    made = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    call(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", made, source, cwd=made)
    return next(made.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; what it depends on is borrowed from this one."""
    folder = tmp_path_factory.mktemp("clean")
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # A path added this way has its own .pth files ignored, the one of the editable install among them.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--quiet", "--no-deps", "--no-index", "--prefix", folder)
    call(sys.executable, "-m", "pip", "install", "--ignore-installed", *options, wheel, cwd=folder)
    return folder


def test_the_wheel_holds_every_module_of_the_checkout_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    prefixes = {folder: "residency" if folder == "residency" else f"residency/{folder}" for folder in FOLDERS}
    prefixes |= {"residency/cli": "residency/cli", "statemachine/planner": "residency/statemachine/planner"}

    sources = {f"{prefix}/{path.name}" for folder, prefix in prefixes.items() for path in (ROOT / folder).glob("*.py")}
    assert packed == sources | {"residency/py.typed"}


def test_the_wheel_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    shown = call(installed / "bin" / "residency", "--help", cwd=tmp_path)

    assert shown.startswith("Usage: residency ")


@pytest.mark.parametrize("package", ["residency.cli", "residency.statemachine.planner", *PACKAGES])
def test_the_wheel_imports_its_own_packages(package: str, installed: Path, tmp_path: Path) -> None:
    code = f"import {package} as found; print(found.__file__)"
    file = call(installed / "bin" / "python", "-c", code, cwd=tmp_path).strip()

    assert Path(file).is_relative_to(installed)


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_an_editable_install_imports_from_the_checkout(folder: str, tmp_path: Path) -> None:
    code = f"import residency.{folder} as found; print(found.__file__)"
    file = call(sys.executable, "-c", code, cwd=tmp_path).strip()

    assert Path(file).resolve() == ROOT / folder / "__init__.py"


def test_running_the_package_is_running_the_console_script(tmp_path: Path) -> None:
    assert call(sys.executable, "-m", "residency", "--help", cwd=tmp_path).startswith("Usage: residency ")
