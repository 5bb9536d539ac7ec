# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: writes what the conformance classes of a run came to, as JSON.

    HYPOTHESIS_PROFILE=ci HF_HUB_OFFLINE=1 PYTHONPATH=tests/tools CONFORMANCE_JSON=FILE \\
        python -m pytest -q -p conformance_json tests/test_conformance.py tests/test_family_*.py

One process (no xdist). Classes that the file has already and that were not run are kept, so a run
of one family brings its own entry up to date. A class whose model was not built has no entry.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

COUNTS: dict[Any, Counter[str]] = defaultdict(Counter)
SECONDS: Counter[Any] = Counter()
REASONS: dict[Any, set[str]] = defaultdict(set)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    SECONDS[item.cls] += report.duration
    if report.when == "call" or report.outcome != "passed":
        COUNTS[item.cls][report.outcome] += 1
    if report.skipped and isinstance(report.longrepr, tuple):
        REASONS[item.cls].add(str(report.longrepr[2]).removeprefix("Skipped: "))


def pytest_sessionfinish(session: Any) -> None:
    path = Path(os.environ["CONFORMANCE_JSON"])
    known = json.loads(path.read_text()) if path.exists() else {}
    known.update({cls.__name__: entry(cls) for cls in COUNTS if built(cls) is not None})
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def built(cls: Any) -> Any:
    """The model that a conformance class has tested."""
    subject = getattr(cls, "_conformance_cache", {}).get("subject")
    return getattr(subject, "model", None)


def entry(cls: Any) -> dict[str, Any]:
    model = built(cls)
    geometry, tower = model.vit_declared, type(model.vit_tower())
    return {
        "model": f"{type(model).__module__}:{type(model).__name__}",
        "tower": f"{tower.__module__}:{tower.__name__}",
        "family": getattr(cls, "family", ""),
        "windowed": geometry.window_side is not None,
        "modalities": list(geometry.modalities),
        "counts": dict(sorted(COUNTS[cls].items())),
        "skipped": sorted(REASONS[cls]),
        "seconds": round(SECONDS[cls]),
    }
