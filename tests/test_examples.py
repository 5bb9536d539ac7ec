# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def test_offline_example_generates_with_graphs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline.py"), "--max-tokens=8"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    for media in ("1 images, 0 videos", "2 images, 0 videos", "0 images, 1 videos"):
        assert re.search(rf"{media}: ['\"].+['\"]", run.stdout), run.stdout[-4000:]
    counts = re.findall(r"Encoder CUDA graphs: (\d+) items replayed, (\d+) items eager", output)
    assert counts[-1] == ("4", "0"), output[-4000:]
