# SPDX-License-Identifier: Apache-2.0
"""The gate on coverage, fed with reports that coverage itself wrote about small packages."""

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from tools import coverage_gate

ROOT = Path(__file__).resolve().parents[1]
MODULES = [Path(name).stem for name in coverage_gate.STRICT]
COVERED = """
    def f(flag):
        if flag:
            return 1
        return 2
    f(True), f(False)
"""


def measure(root: Path, **modules: str) -> Path:
    """Run a package of ``modules`` beside four covered ones under this project's configuration."""
    package = root / coverage_gate.PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    for name, text in {**dict.fromkeys(MODULES, COVERED), **modules}.items():
        if text:
            (package / f"{name}.py").write_text(dedent(text))
    imports = "\n".join(f"import {name}" for name, text in modules.items() if text)
    imports += "".join(f"\nimport {name}" for name in MODULES if modules.get(name, " "))
    (root / "main.py").write_text(f"import sys; sys.path.insert(0, {str(package)!r})\n{imports}")
    coverage = [sys.executable, "-m", "coverage"]
    config = f"--rcfile={ROOT / 'pyproject.toml'}"
    for command in (["run", config, "main.py"], ["json", config, "-q", "-o", "report.json"]):
        subprocess.run([*coverage, *command], cwd=root, check=True, capture_output=True)
    return root / "report.json"


def test_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage_gate.main(measure(tmp_path, other=COVERED), tmp_path) == 0
    output = capsys.readouterr().out
    assert "* geometry.py" in output and "  other.py" in output
    assert output.endswith("coverage: enough\n")


@pytest.mark.parametrize("name", MODULES)
def test_a_line_that_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text = COVERED.replace(", f(False)", "")
    assert coverage_gate.main(measure(tmp_path, **{name: text}), tmp_path) == 1
    output = capsys.readouterr().out
    assert f"{name}.py: 50.0 % is below 95 %; not run: 5\n" in output


MANY_LINES = "".join(f"x{n} = {n}\n" for n in range(90))
BRANCH_NOT_TAKEN = """
def f(flag):
    if flag:
        g = 1
f(True)
"""


def test_branches_count_for_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All lines run and one branch of two is taken: 99 % together, 50 % of the branches."""
    report = measure(tmp_path, planning=MANY_LINES + BRANCH_NOT_TAKEN)
    assert coverage_gate.main(report, tmp_path) == 1
    assert "planning.py: 50.0 % is below 95 %; not run: 93->exit" in capsys.readouterr().out


def test_lines_are_told_as_ranges() -> None:
    assert list(coverage_gate.ranges([1, 2, 3, 5, 9, 10])) == ["1-3", "5", "9-10"]
    assert list(coverage_gate.ranges([])) == []


def test_over_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module without a limit of its own may lack more, as long as the sum is enough."""
    report = measure(tmp_path / "a", other=dedent(COVERED) + "if not f(True):\n    x = 1\n")
    assert coverage_gate.main(report, tmp_path / "a") == 0
    never_run = "if not f(True):\n" + "".join(f"    x{n} = {n}\n" for n in range(40))
    report = measure(tmp_path / "b", other=dedent(COVERED) + never_run)
    assert coverage_gate.main(report, tmp_path / "b") == 1
    output = capsys.readouterr().out
    assert re.search(r"over all: \d\d\.\d % is below 90 %; not run:", output)
    assert "other.py: 8-47\n" in output


def test_a_module_that_no_test_imports_counts(tmp_path: Path) -> None:
    package = tmp_path / coverage_gate.PACKAGE
    package.mkdir(parents=True)
    (package / "unused.py").write_text(MANY_LINES)
    entries = json.loads(measure(tmp_path).read_text())["files"]
    assert entries[f"{coverage_gate.PACKAGE}/unused.py"]["summary"]["covered_lines"] == 0


def test_a_strict_module_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage_gate.main(measure(tmp_path, mixin=""), tmp_path) == 1
    assert "mixin.py is not in the report" in capsys.readouterr().out


GPU_ONLY = """
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        import decimal
    def f(cuda):
        if cuda:
            x = 1  # no cover: needs a GPU
            return x  # no cover: needs a GPU
        return 2
    f(False)
"""


def test_lines_for_a_gpu_are_left_out_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coverage_gate.main(measure(tmp_path / "a", planning=GPU_ONLY), tmp_path / "a") == 0
    whole_block = GPU_ONLY.replace("  # no cover: needs a GPU", "")
    whole_block = whole_block.replace("if cuda:", "if cuda:  # no cover: needs a GPU")
    report = measure(tmp_path / "b", planning=whole_block)
    assert coverage_gate.main(report, tmp_path / "b") == 1
    assert "planning.py: lines 7, 8 are left out" in capsys.readouterr().out


def test_a_comment_without_a_reason_leaves_nothing_out(tmp_path: Path) -> None:
    text = GPU_ONLY.replace("no cover: needs a GPU", "pragma: no cover")
    assert coverage_gate.main(measure(tmp_path, planning=text), tmp_path) == 1


@pytest.mark.parametrize("text", [None, "", "{}", '{"meta": {"branch_coverage": false}}'])
def test_what_is_no_report_is_not_enough(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    assert coverage_gate.main(path) == 2
