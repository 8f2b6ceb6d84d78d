"""The project as a stranger meets it: what is installed, what the README shows, what the commands say."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bookkit.paths import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        built,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_library_alone(wheel):
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"matchkernel"}
    held = {name for name in wheel.namelist() if name.startswith("matchkernel/")}
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/matchkernel").rglob("*.py")}
    assert held == ours | {"matchkernel/py.typed"}


def test_the_wheel_needs_torch_alone(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    needed = re.findall(r"^Requires-Dist: (.+)$", wheel.read(name).decode(), re.MULTILINE)
    assert [need for need in needed if "extra ==" not in need] == ["torch>=2.9"]
    assert any("extra == 'book'" in need or 'extra == "book"' in need for need in needed)
    assert any("extra == 'dev'" in need or 'extra == "dev"' in need for need in needed)


def test_importing_the_library_imports_neither_the_book_nor_its_tools():
    command = "import matchkernel, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True)
    assert {"bookkit", "matplotlib", "IPython", "tokenizers", "transformers", "sklearn"}.isdisjoint(
        result.stdout.split()
    )


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-dev.txt", "requirements-models.txt", "constraints.txt"]
)
def test_requirements_are_exact(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[\w.\[\]-]+==[\w.]+", line) for line in lines)
    assert len({line.split("==")[0].lower() for line in lines}) == len(lines)


def test_constraints_agree_with_requirements():
    def pins(name):
        lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
        return {re.sub(r"[-_.]+", "-", package.lower()): version for package, version in lines}

    constraints = pins("constraints.txt")
    for package, version in (pins("requirements.txt") | pins("requirements-dev.txt")).items():
        assert constraints.get(package, version) == version


def readme_taste() -> tuple[str, str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    after = readme.partition("<!-- taste -->")[2]
    match = re.search(r"```python\n(.*?)```.*?```(?:text)?\n(.*?)```", after, re.DOTALL)
    assert match, "README.md has no <!-- taste --> followed by a python block and its output"
    return match[1], match[2]


def test_the_readmes_taste_prints_what_it_says():
    source, output = readme_taste()
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 14, "a taste is ten lines or so"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == output.strip()


def test_the_readmes_links_and_files_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", readme) if "://" not in target]
    targets += re.findall(r'(?:src|href)="([^"#:]+)"', readme)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_commands_of_the_readme_are_commands_of_make():
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    as_code = "\n".join(re.findall(r"`[^`]+`|^ {4}.*$|^make .*$", readme, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)\b", as_code))
    assert {"book", "test"} <= named <= known


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_make_help_lists_the_commands():
    listed = make("help").stdout
    for command in ("book", "serve", "test", "test-slow", "chapter", "chapters", "lab", "bench", "clean"):
        assert f"make {command} " in listed


@pytest.mark.parametrize("python", ["false", "no-such-python"])
def test_an_old_or_missing_python_is_told_so(tmp_path, python):
    shutil.copy(ROOT / "Makefile", tmp_path / "Makefile")
    result = make("book", f"PYTHON={python}", folder=tmp_path)
    assert result.returncode != 0 and "3.11" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_chapter_that_is_not_named_is_asked_for():
    result = make("chapter", "-o", "setup")
    assert result.returncode == 2 and "make chapter N=03" in result.stderr


def test_ci_runs_make_test():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)
    assert re.search(r"^make test$", script.read_text(), re.MULTILINE)
