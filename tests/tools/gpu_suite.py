# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on a GPU: real CUDA graphs, real attention kernels, a table at the end.

    python tests/tools/gpu_suite.py                                   # FlashAttention, bfloat16
    python tests/tools/gpu_suite.py --attention TRITON_ATTN --dtype float16 --examples 20
    python tests/tools/gpu_suite.py --planted --classes TestQwen25VL  # each fault in a process
    python tests/tools/gpu_suite.py --suite families                  # tests/test_family_*.py

Needs a vLLM for GPUs with this package, pytest and hypothesis; not pytest-timeout. It runs one
pytest process a class, several at a time on the one GPU, because a tiny tower leaves it idle.
Planted faults are left out unless asked for: some end the CUDA context (an index out of range), so
each gets a process of its own. Ends with 1 if a test failed or a process ran none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUITES = {"conformance": "test_conformance.py", "families": "test_family_*.py"}
FAULTS = ROOT / "vllm" / "vit_cudagraph" / "testing" / "faults.py"
WORST = re.compile(r"largest error against (.*), torch\.(\w+): (\S+) of (\S+) allowed")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
EXAMPLES = re.compile(r"during generate phase.*?(\d+) passing, (\d+) failing", re.DOTALL)


def classes() -> dict[str, dict[str, Path]]:
    """Test classes of each suite and their files, those for a GPU alone included."""
    return {
        suite: {
            name: file
            for file in sorted((ROOT / "tests").glob(pattern))
            for name in re.findall(r"^\s*class (Test\w+)", file.read_text(), re.MULTILINE)
        }
        for suite, pattern in SUITES.items()
    }


def planted_faults() -> list[str]:
    """Names of the planted faults."""
    return re.findall(r'^@fault\(\s*"([^"]+)"', FAULTS.read_text(), re.MULTILINE)


def run(unit: tuple[str, Path, str], options: argparse.Namespace) -> dict[str, Any]:
    """One class, or one planted fault in it, in a process of its own; what its output says."""
    name, file, fault = unit
    environment = os.environ | {
        "VIT_CUDAGRAPH_TEST_DEVICE": "cuda",
        "VIT_CUDAGRAPH_TEST_DTYPE": options.dtype,
        "VIT_CUDAGRAPH_TEST_ATTENTION": options.attention,
        "VIT_CUDAGRAPH_TEST_FLASH": options.flash,
        "VIT_CUDAGRAPH_EXAMPLES": str(options.examples),
        "HYPOTHESIS_PROFILE": "gpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["-ra", "--tb=short", "--show-capture=no", "--hypothesis-show-statistics"]
    if fault:
        command += [f"{file}::{name}::test_planted_fault[{fault}]"]
    else:
        chosen = "not planted_fault" + (f" and ({options.only})" if options.only else "")
        command += [f"{file}::{name}", "-k", chosen]
    start = time.time()
    log = options.logs / (re.sub(r"\W+", "_", f"{name} {fault}".strip()) + ".log")
    with log.open("w") as out:
        try:
            status = subprocess.run(
                command, env=environment, stdout=out, stderr=out, timeout=options.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    text = log.read_text()
    summary = next((line for line in reversed(text.splitlines()) if " in " in line), "")
    return {
        "class": name,
        "fault": fault,
        "status": status,
        "seconds": round(time.time() - start),
        "counts": {what: int(number) for number, what in COUNT.findall(summary)},
        "examples": sum(int(good) + int(bad) for good, bad in EXAMPLES.findall(text)),
        "worst": [list(found) for found in WORST.findall(text)],
        "failed": sorted(set(re.findall(r"^FAILED \S+::(.*)$", text, re.MULTILINE))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--attention", default="FLASH_ATTN", choices=["FLASH_ATTN", "TRITON_ATTN"])
    parser.add_argument("--flash", default="", choices=["", "2", "3"], help="its version")
    parser.add_argument("--examples", type=int, default=40, help="of each property")
    parser.add_argument("--only", default="", help="pytest -k, besides the class")
    parser.add_argument("--suite", default="conformance", choices=SUITES)
    parser.add_argument("--classes", default="", help="comma-separated; or all of a suite")
    parser.add_argument("--planted", action="store_true", help="the planted faults, nothing else")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=500, help="limit of one class")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/gpu_suite"))
    parser.add_argument("--json", type=Path, help="write the table here as well")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    suites = classes()
    known = {name: file for suite in suites.values() for name, file in suite.items()}
    chosen = options.classes.split(",") if options.classes else list(suites[options.suite])
    if unknown := set(chosen) - known.keys():
        parser.error(f"no such classes: {sorted(unknown)}; there are {', '.join(known)}")
    units = [
        (name, known[name], fault)
        for name in chosen
        for fault in (planted_faults() if options.planted else [""])
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda unit: run(unit, options), units))
    for row in rows:
        print(f"{row['class']:<22} {row['seconds']:>4} s  {row['examples']:>6} examples", end="  ")
        counts = ", ".join(f"{number} {what}" for what, number in row["counts"].items())
        print(counts or "none ran", row["fault"])
        for what, dtype, worst, allowed in row["worst"]:
            print(f"    {what} ({dtype}): {worst} of {allowed}")
        for failed in row["failed"]:
            print(f"    FAILED {failed[:230]}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    ran = ("passed", "skipped")
    return int(any(row["status"] or not any(row["counts"].get(k) for k in ran) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
