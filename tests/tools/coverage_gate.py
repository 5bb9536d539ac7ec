# SPDX-License-Identifier: Apache-2.0
"""Is enough of the package covered by the tests? ``make test`` asks.

``python tests/tools/coverage_gate.py .coverage.json`` reads the report that ``coverage json`` or
pytest-cov wrote, with branches, and prints a table. Lines, branches, and both together as coverage
counts them must each reach the limit: 95 % in each of the modules whose faults would be wrong
values, 90 % over all. A line that only a GPU reaches is left out by a comment on that line,

    # no cover: needs a GPU

and on each line of a block: a comment that hides lines below it is an error here.

Exit status: 0 when all limits are reached, 1 when not (the files and the missing lines are named),
2 when the report cannot be used.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm/vit_cudagraph"
LIMIT, OVERALL_LIMIT = 95.0, 90.0
STRICT = tuple(f"{PACKAGE}/{name}.py" for name in ("geometry", "metadata", "mixin", "planning"))
REASON = "# no cover: needs a GPU"


class Counts(NamedTuple):
    """Covered and existing lines and branches."""

    lines: int
    all_lines: int
    branches: int
    all_branches: int

    @classmethod
    def of(cls, summary: dict[str, Any]) -> Counts:
        """From a ``summary`` of the report."""
        names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
        return cls(*(summary[name] for name in names))

    def percentages(self) -> tuple[float, float, float]:
        """Lines, branches, both together; 100 where there is nothing to cover."""
        pairs = (
            (self.lines, self.all_lines),
            (self.branches, self.all_branches),
            (self.lines + self.branches, self.all_lines + self.all_branches),
        )
        return tuple(100.0 * part / whole if whole else 100.0 for part, whole in pairs)


def hidden_lines(source: str, excluded: list[int]) -> list[int]:
    """Which of the ``excluded`` lines neither say why nor are read by a type checker alone."""
    typing_only: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typing_only.update(range(node.lineno, node.body[-1].end_lineno + 1))
    lines = source.splitlines()
    return [n for n in excluded if REASON not in lines[n - 1] and n not in typing_only]


def ranges(lines: list[int]) -> Iterator[str]:
    """``3, 5-7`` for 3, 5, 6, 7."""
    start = previous = None
    for line in [*lines, None]:
        if previous is not None and line != previous + 1:
            yield str(start) if start == previous else f"{start}-{previous}"
        if previous is None or line != previous + 1:
            start = line
        previous = line


def missing(entry: dict[str, Any]) -> str:
    """Lines that no test reached, and branches between lines that were reached."""
    lines = entry["missing_lines"]
    parts = list(ranges(lines))
    # A branch ends at a negative number where it leaves the function or module.
    parts += [
        f"{a}->{b if b > 0 else 'exit'}"
        for a, b in entry["missing_branches"]
        if a not in lines and b not in lines
    ]
    return ", ".join(parts) or "nothing"


def problems(report: dict[str, Any], root: Path) -> list[str]:
    """What keeps the report from passing, a line each."""
    files = report["files"]
    found = [f"{name} is not in the report" for name in STRICT if name not in files]
    for name, entry in sorted(files.items()):
        hidden = hidden_lines((root / name).read_text(encoding="utf-8"), entry["excluded_lines"])
        if hidden:
            found.append(
                f"{name}: lines {', '.join(map(str, hidden))} are left out by a comment that is "
                f"not theirs; put {REASON!r} on each line that only a GPU reaches"
            )
        lowest = min(Counts.of(entry["summary"]).percentages())
        if name in STRICT and lowest < LIMIT:
            found.append(f"{name}: {lowest:.1f} % is below {LIMIT:g} %; not run: {missing(entry)}")
    lowest = min(Counts.of(report["totals"]).percentages())
    if lowest < OVERALL_LIMIT:
        found.append(f"over all: {lowest:.1f} % is below {OVERALL_LIMIT:g} %; not run:")
        found += [
            f"    {name}: {missing(entry)}"
            for name, entry in sorted(files.items())
            if entry["missing_lines"] or entry["missing_branches"]
        ]
    return found


def table(report: dict[str, Any]) -> str:
    """One row a file, the modules with a limit of their own marked, and the sum."""
    rows = [f"{'covered %':<44}{'lines':>9}{'branches':>10}{'both':>8}{'GPU only':>10}"]
    entries = {**dict(sorted(report["files"].items())), "over all": {"summary": report["totals"]}}
    for name, entry in entries.items():
        values = "".join(
            f"{value:>{width}.1f}"
            for value, width in zip(
                Counts.of(entry["summary"]).percentages(), (9, 10, 8), strict=True
            )
        )
        mark = "* " if name in STRICT else "  "
        short = name.removeprefix(f"{PACKAGE}/")
        rows.append(f"{mark}{short:<42}{values}{entry['summary']['excluded_lines']:>10}")
    rows.append(f"* at least {LIMIT:g} % each; over all at least {OVERALL_LIMIT:g} %")
    return "\n".join(rows)


def main(path: Path, root: Path = ROOT) -> int:
    """Print the table and what is wrong; the exit status."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        measured = report["meta"]["branch_coverage"]
    except (OSError, ValueError, KeyError) as error:
        print(f"{path} is no report of coverage ({error!r}); run `make test`", file=sys.stderr)
        return 2
    if not measured:
        print(f"{path} has no branches; set branch = true in [tool.coverage.run]", file=sys.stderr)
        return 2
    print(table(report))
    found = problems(report, root)
    print("\n".join(f"coverage: {line}" for line in found) or "coverage: enough")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: coverage_gate.py REPORT.json")
    sys.exit(main(Path(sys.argv[1])))
