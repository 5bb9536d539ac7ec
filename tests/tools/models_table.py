# SPDX-License-Identifier: Apache-2.0
"""The table of families, all of it from code and from results.

    python tests/tools/models_table.py > docs/models.md
    python tests/tools/models_table.py --check          # 1 if docs/models.md says something else

A family is a file of ``vllm/vit_cudagraph/models``. What a tower is, and how the conformance suite
came out on the twin, is in ``benchmarks/results/conformance-twin.json``
(``tests/tools/conformance_json.py`` writes it); on a GPU in ``conformance-h200-*.json`` beside it
(``tests/tools/gpu_suite.py``). Upstream's lines are counted in the vLLM that is installed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from count_hooks import MODELS as FOLDER
from count_hooks import _code_lines, _lines, family_files, hook_lines

import vllm
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.model_executor.models.registry import ModelRegistry
from vllm.vit_cudagraph.registration import MODELS, NOT_CAPTURABLE, Served
from vllm.vit_cudagraph.testing import checkpoints

ROOT = FOLDER.parents[2]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results"
TWIN = RESULTS / "conformance-twin.json"
OURS = "vllm.vit_cudagraph.models."
PROTOCOL = tuple(n for n, f in vars(SupportsEncoderCudaGraph).items() if inspect.isfunction(f))
METADATA = ("prepare_encoder_metadata",)
"""What upstream's towers call the metadata of their graphs."""

INTRODUCTION = """\
# Models

Made by `python tests/tools/models_table.py > docs/models.md` out of the code and of the results of
tests; do not edit it. Hook lines are counted as in
[adding-a-model.md](adding-a-model.md#6-count-the-lines).

- *Twin*: tests of the conformance suite on the CPU twin
  (`benchmarks/results/conformance-twin.json`, written by the command in
  `tests/tools/conformance_json.py`).
- *GPU*: the same suite with real CUDA graphs and kernels
  (`benchmarks/results/conformance-h200-*.json`, written by `tests/tools/gpu_suite.py`).
- *Processor*: whose makes the inputs of the tests; ours stands in where no installed package ships
  the family's.
"""


def twin_results() -> dict[str, dict[str, Any]]:
    return json.loads(TWIN.read_text()) if TWIN.exists() else {}


def of_family(family: str) -> dict[str, dict[str, Any]]:
    """The twin's results of the classes that test one of our modules."""
    tested = twin_results().items()
    return {n: found for n, found in tested if found["model"].startswith(f"{OURS}{family}:")}


def architectures(family: str) -> dict[str, Served]:
    return {name: served for name, served in MODELS.items() if served.module == family}


# -- cells -----------------------------------------------------------------------------------------


def counted(counts: dict[str, int]) -> str:
    """``24 passed``, or with what else there was, skipped tests apart."""
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return f"{counts.get('passed', 0)} passed" + (f", **{failed} failed**" if failed else "")


def twin_cell(family: str) -> str:
    total: Counter[str] = Counter()
    for found in of_family(family).values():
        total.update(found["counts"])
    return counted(total) if total else "not run"


@cache
def gpu_results() -> list[tuple[str, dict[str, Any]]]:
    """(run, class's result) of all runs on a GPU but those of planted faults."""
    files = sorted(RESULTS.glob("conformance-h200-*.json"))
    return [
        (path.stem.removeprefix("conformance-"), row)
        for path in files
        if "planted" not in path.stem
        for row in json.loads(path.read_text())
    ]


def tested_as(name: str) -> str:
    """The class of the twin's results that a class on a GPU belongs to: its own, or the one that it
    has the name of with a size behind (``TestQwen2VL7B``)."""
    known = [twin for twin in twin_results() if name.startswith(twin)]
    return max(known, key=len, default="")


def gpu_cell(family: str) -> str:
    """Passed tests of all runs."""
    runs, total = set(), Counter[str]()
    for run, row in gpu_results():
        if tested_as(row["class"]) in of_family(family):
            runs.add(run)
            total.update(row["counts"])
    if not runs:
        return "not run"
    return f"{counted(total)} ({len(runs)} run{'s' if len(runs) > 1 else ''})"


def processor_cell(family: str) -> str:
    """What the tests' checkpoints say of themselves; ``ours`` and a note where it is not real."""
    said = {processor_of(found["family"]) for found in of_family(family).values()}
    return ", ".join(sorted({text if text == "real" else "ours" for text in said})) or "?"


def processor_of(checkpoint: str) -> str:
    return "real" if checkpoint in checkpoints.FAMILIES else said_by(checkpoint, "PROCESSOR")


def said_by(checkpoint: str, name: str) -> str:
    """What the module of a tiny checkpoint says of itself."""
    if checkpoint in checkpoints.FAMILIES:
        return ""
    module = importlib.import_module(f"vllm.vit_cudagraph.testing.families.{checkpoint}")
    return str(getattr(module, name, ""))


def notes(family: str) -> str:
    """The module's own words, what stands in for a processor, and what is not in this vLLM."""
    told = [summary(family)[1]]
    for found in of_family(family).values():
        processor = processor_of(found["family"])
        if processor != "real":
            told.append(f"Processor: {processor}")
        told.append(said_by(found["family"], "NOTE"))
    served = architectures(family)
    absent = [name for name in served if upstream(name) is None]
    if absent:
        names = ", ".join(f"`{name}`" for name in absent)
        told.append(f"Not in the vLLM that counted this: {names}")
    sentences = dict.fromkeys(text.strip().rstrip(".") for text in told if text)
    return ". ".join(text[0].upper() + text[1:] for text in sentences) + "."


def summary(family: str) -> tuple[str, str]:
    """Name and description: the two halves of the first paragraph of the module's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{family}.py").read_text())) or family
    name, _, rest = " ".join(text.split("\n\n")[0].split()).partition(": ")
    return name.rstrip("."), rest


def row(family: str) -> list[str]:
    tested = of_family(family).values()
    lines = hook_lines(FOLDER / f"{family}.py")
    towers = dict.fromkeys(found["tower"].partition(":")[2] for found in tested)
    modalities = dict.fromkeys(m for found in tested for m in found["modalities"])
    windowed = {found["windowed"] for found in tested}
    return [
        summary(family)[0],
        "<br>".join(f"`{name}`" for name in architectures(family)),
        "<br>".join(f"`{name}`" for name in towers) or "?",
        ", ".join(str(n) for n in dict.fromkeys(lines.values())),
        {True: "yes", False: "no"}[windowed.pop()] if len(windowed) == 1 else "?",
        ", ".join(modalities) or "?",
        processor_cell(family),
        twin_cell(family),
        gpu_cell(family),
        notes(family),
    ]


HEADER = [
    "Family",
    "Architectures",
    "Tower",
    "Hook lines",
    "Windows",
    "Modalities",
    "Processor",
    "Twin",
    "GPU",
    "Notes",
]


# -- upstream's lines ------------------------------------------------------------------------------


def upstream(architecture: str) -> Any:
    """Upstream's class, or None where the installed vLLM has none."""
    served = MODELS[architecture]
    try:
        module = importlib.import_module(served.upstream_module)
    except ImportError:
        return None
    return getattr(module, served.class_name or architecture, None)


def loaded(name: str) -> Any:
    module, _, cls = name.partition(":")
    return getattr(importlib.import_module(module), cls, None)


@cache
def definitions(path: Path) -> tuple[dict[str, ast.ClassDef], frozenset[int]]:
    """Classes of a file by name, and its lines of code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return classes, frozenset(_code_lines(path, tree))


def methods(cls: Any, names: tuple[str, ...]) -> Iterator[tuple[Path, int]]:
    """(file, line) of all code of methods so called, of a class and of those it inherits from."""
    for base in cls.__mro__:
        here = base.__module__.startswith("vllm.") and not base.__module__.startswith(OURS[:-8])
        if not here or base is SupportsEncoderCudaGraph:
            continue
        path = Path(inspect.getsourcefile(base) or "")
        classes, code = definitions(path)
        for node in classes[base.__name__].body if base.__name__ in classes else ():
            if isinstance(node, ast.FunctionDef) and node.name in names:
                yield from ((path, line) for line in _lines(node) & code)


def upstream_lines(family: str) -> tuple[set[tuple[Path, int]], set[tuple[Path, int]]]:
    """Code of upstream's protocol methods, and of its towers' metadata, as sets: what several
    classes share counts once."""
    classes = filter(None, map(upstream, architectures(family)))
    protocol = {line for cls in classes for line in methods(cls, PROTOCOL)}
    towers = filter(None, (loaded(found["tower"]) for found in of_family(family).values()))
    return protocol, {line for tower in towers for line in methods(tower, METADATA)}


def hook_total() -> int:
    """Lines of hooks; of classes of one family that share a mixin, the largest counts."""
    return sum(max(hook_lines(path).values()) for path in family_files())


def others() -> list[str]:
    """Architectures of the installed vLLM that are not in the table though their class has the
    protocol's methods in its own file."""
    found = []
    for name, entry in ModelRegistry.models.items():
        module = getattr(entry, "upstream_module", "") or getattr(entry, "module_name", "")
        path = Path(vllm.__path__[0], *module.split(".")[1:]).with_suffix(".py")
        known = name in MODELS or name in NOT_CAPTURABLE
        if not known and path.exists() and f"def {PROTOCOL[0]}(" in path.read_text():
            cls = definitions(path)[0].get(entry.class_name)
            bodies = cls.body if cls else ()
            if any(getattr(node, "name", "") == PROTOCOL[0] for node in bodies):
                found.append(name)
    return sorted(found)


# -- page ------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def page() -> str:
    families = [path.stem for path in family_files()]
    protocol: set[tuple[Path, int]] = set()
    metadata: set[tuple[Path, int]] = set()
    for family in families:
        more = upstream_lines(family)
        protocol |= more[0]
        metadata |= more[1]
    refused = [[f"`{name}`", reason] for name, reason in NOT_CAPTURABLE.items()]
    version = re.sub(r"\+.*", "", vllm.__version__)
    return "\n".join(
        [
            INTRODUCTION,
            *table(HEADER, sorted(map(row, families), key=lambda cells: cells[0].lower())),
            "",
            "## Not captured",
            "",
            *(table(["Architecture", "Why"], refused) if refused else ["None so far."]),
            "",
            "## Upstream's own graphs",
            "",
            f"Architectures of vLLM {version} with encoder graphs that are not on the mixin:",
            "",
            *([", ".join(f"`{name}`" for name in others()) + "."]),
            "",
            "## Lines",
            "",
            f"Of the {len(families)} families above, {len(MODELS)} architectures. Of a family's "
            "classes the largest",
            f"counts; what upstream's classes share counts once (vLLM {version}).",
            "Comments, docstrings and blank lines count on neither side.",
            "",
            *table(
                ["", "Lines of code"],
                [
                    ["Hooks here", str(hook_total())],
                    ["Upstream's methods of `SupportsEncoderCudaGraph`", str(len(protocol))],
                    [f"Upstream's `{METADATA[0]}` of the same towers", str(len(metadata))],
                ],
            ),
            "",
        ]
    )


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        sys.stdout.write(text)
        return 0
    if text == PAGE.read_text():
        return 0
    print(f"{PAGE} is not what {Path(__file__).name} makes of the code and the results")
    return 1


if __name__ == "__main__":
    sys.exit(main())
