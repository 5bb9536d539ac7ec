# SPDX-License-Identifier: Apache-2.0
"""The documents of the test kit: the chapter's module runs as it stands, the tables are true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.vit_cudagraph.testing.defects import DEFECTS
from vllm.vit_cudagraph.testing.faults import FAULTS

ROOT = Path(__file__).parent.parent
CHAPTER = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
TESTING = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")

# A part of the class: properties, an example of a defect, a planted fault, histories.
RIGHT = (
    "test_images",
    "test_videos",
    "test_turns",
    "test_hooks",
    "test_variants",
    "test_named_edges",
    "test_histories",
    "test_defect[3: zeros after the last offset]",
    "test_planted_fault[tail padded with zeros]",
)

MODEL = "        model = models.build_model(config, fill=models.load_weights(config))\n"
WRONG_GEOMETRY = (
    '        model.vit_declared = __import__("dataclasses").replace('
    'model.vit_declared, sequences="item")\n'
)


def code_block(name: str) -> str:
    """The chapter's block of Python that begins with a comment of its file's name."""
    chapter = CHAPTER.split("\n## Conformance\n")[1]
    blocks = re.findall(r"^```python\n(.*?)^```$", chapter, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(f"# {name}\n")]
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of pytest over the chapter's module and a copy whose geometry is wrong, which lie
    beside the chapter's conftest: frames of a video are one sequence there."""
    folder = tmp_path_factory.mktemp("chapter")
    module = code_block("tests/test_my_model.py")
    assert module.count(MODEL) == 1
    (folder / "conftest.py").write_text(code_block("conftest.py"))
    (folder / "test_my_model.py").write_text(module)
    (folder / "test_wrong.py").write_text(module.replace(MODEL, MODEL + WRONG_GEOMETRY))
    chosen = [f"test_my_model.py::TestMyModel::{name}" for name in RIGHT]
    chosen += [f"test_wrong.py::TestMyModel::test_{name}" for name in ("images", "videos")]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--strict-markers", "--tb=short"]
    command += ["--show-capture=no", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {
        "HYPOTHESIS_PROFILE": "dev",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "250",  # or the reason of a failure is cut off
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_chapters_module_passes_as_it_stands(outcome: str) -> None:
    passed = re.findall(r"^PASSED test_my_model\.py::TestMyModel::(.*)$", outcome, re.MULTILINE)
    assert sorted(passed) == sorted(RIGHT), outcome


@pytest.mark.slow
def test_the_chapters_module_fails_with_a_wrong_geometry(outcome: str) -> None:
    """Images are right, videos are not, and nothing else has failed."""
    assert "PASSED test_wrong.py::TestMyModel::test_images" in outcome, outcome
    (failed,) = re.findall(r"^(?:FAILED|ERROR) (.*)$", outcome, re.MULTILINE)
    name, _, reason = failed.partition(" - ")
    assert name == "test_wrong.py::TestMyModel::test_videos"
    assert "Mismatch: item " in reason and "differs from the eager path" in reason


# -- docs/testing.md -------------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    """Cells of the only table below a heading, without its head."""
    section = re.split(r"^## ", TESTING.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_table_of_planted_faults_is_the_registry() -> None:
    written = [
        (name, tuple(re.findall(r"`(\w+)`", caught)), needs)
        for name, caught, needs in table("Planted faults")
    ]
    assert written == [(f.name, f.caught_by, f.needs) for f in FAULTS.values()]


def test_the_table_of_defects_has_every_kind_and_every_example() -> None:
    rows = table("Kinds of defects")
    assert [int(row[0]) for row in rows] == list(range(1, 14))
    for name in DEFECTS:
        number = int(name.partition(":")[0])
        assert f"`{name}`" in rows[number - 1][2], name
    named = {name for row in rows for name in re.findall(r"`(\d+: [^`]+)`", row[2])}
    assert named == set(DEFECTS)


@pytest.mark.parametrize("text", [CHAPTER, TESTING], ids=["adding-a-model.md", "testing.md"])
def test_files_that_are_named_exist(text: str) -> None:
    named = set(re.findall(r"`((?:tests|benchmarks|docs|vllm)/[\w./-]+\.\w+)", text))
    assert len(named) > 5
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/test_\w+\.py)::(\w+)", TESTING)
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)
