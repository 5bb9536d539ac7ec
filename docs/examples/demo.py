# SPDX-License-Identifier: Apache-2.0
"""Graph and eager answers side by side, from the real `vllm serve`, on any machine.

Makes a tiny random Qwen2.5-VL, serves it twice, first by stock vLLM and then with encoder graphs
on the CPU twin, sends the same chat requests to both over HTTP, and prints a table. Ends non-zero
if an answer or a log-probability differs, if no graph ran, or if different photographs get the
same log-probabilities (then the comparison would prove nothing).

    make demo
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.photos import panning_frames, photo, video_url
from vllm.vit_cudagraph.testing.serving import (
    STOCK,
    TWIN,
    Answer,
    Server,
    ServerError,
    Statistics,
    image_part,
    text_part,
    video_part,
)

# The largest budget is below the largest photograph, so that one row of the table is eager.
TOKEN_BUDGETS = [64, 128, 256, 512]
MAX_TOKENS = 8
TOLERANCE = 1e-4  # of a log-probability: equal to 4 decimals
# vLLM names sockets by a UUID in the temporary folder, and a socket's path has at most about 100
# characters.
LONGEST_TMPDIR = 60

_START = time.monotonic()


@dataclass(frozen=True)
class Request:
    """One chat message, and whether it is a single photograph (those must all differ)."""

    name: str
    content: list[dict[str, Any]]
    is_single_photo: bool = False


@dataclass(frozen=True)
class Row:
    """A request's answer, and what the encoder did for it by the server's own count."""

    answer: Answer
    statistics: Statistics


def say(message: str) -> None:
    """Print `message` with the seconds since the start."""
    print(f"[{time.monotonic() - _START:4.0f} s] {message}", flush=True)


def make_requests() -> list[Request]:
    """Single photographs of several shapes, several in one prompt, one video, all of them mixed."""
    question = text_part("What is in the picture?")
    shapes = {
        "rocket": (640, 427),
        "astronaut": (224, 224),
        "chelsea": (301, 199),
        "coffee": (56, 56),
        "motorcycle": (700, 84),
        "hubble": (56, 560),
    }
    requests = [
        Request(
            f"{name} {width}x{height}", [image_part(photo(name, (width, height))), question], True
        )
        for name, (width, height) in shapes.items()
    ]
    largest = photo("retina")
    requests.append(
        Request("retina 1411x1411", [image_part(largest, "JPEG"), question], is_single_photo=True)
    )
    several = [image_part(photo(name, shapes[name])) for name in ("astronaut", "chelsea", "coffee")]
    requests.append(Request("three photographs", [*several, text_part("Compare them.")]))
    video = video_part(video_url(panning_frames("rocket", num_frames=8, size=(224, 168))))
    requests.append(Request("video, 8 frames 224x168", [video, text_part("What happens?")]))
    mixed = [text_part("Is this"), several[1], text_part("seen in"), video, text_part("or not?")]
    requests.append(Request("photograph and video", mixed))
    return requests


def ask(server: Server, requests: Sequence[Request]) -> list[Row]:
    """Send `requests` one after the other, so that the log's counters can be told apart."""
    rows = []
    before = server.statistics()
    for request in requests:
        answer = server.chat(request.content, max_tokens=MAX_TOKENS)
        after = server.statistics()
        rows.append(Row(answer, after.since(before)))
        before = after
    return rows


def serve_and_ask(
    name: str, checkpoint: Path, settings: dict[str, Any], requests: Sequence[Request]
) -> list[Row]:
    """Answers of a server that lives for the length of this call."""
    say(f"starting `vllm serve`: {name}")
    with Server(checkpoint, **settings) as server:
        say(f"up; sending {len(requests)} requests")
        rows = ask(server, requests)
    say("answered and stopped")
    if "compilation_config" in settings:
        for line in server.log().splitlines():
            if "Captured" in line or ("WARNING" in line and "ncoder" in line):
                print(f"    {line}")
    return rows


def how(statistics: Statistics) -> str:
    """What the encoder did for one request, in words."""
    parts = []
    if statistics.replayed:
        parts.append(f"graph ({statistics.replays} replays, {statistics.padding} padding)")
    if statistics.eager:
        parts.append(f"eager ({statistics.eager} items)")
    return " + ".join(parts) or "not counted"


def print_table(requests: Sequence[Request], eager: Sequence[Row], graphs: Sequence[Row]) -> None:
    """One line a request."""
    heads = ("request", "tokens in", "encoder with graphs on", "answers", "log-probabilities")
    lines = [heads]
    for request, plain, row in zip(requests, eager, graphs, strict=True):
        distance = row.answer.distance(plain.answer)
        same = row.answer.token_ids == plain.answer.token_ids
        lines.append(
            (
                request.name,
                str(row.answer.prompt_tokens),
                how(row.statistics),
                "equal" if same else "DIFFER",
                "equal" if distance <= TOLERANCE else f"DIFFER ({distance:.1e})",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for index, line in enumerate(lines):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
        if index == 0:
            print("  ".join("-" * width for width in widths))
    print()


def faults(requests: Sequence[Request], eager: Sequence[Row], graphs: Sequence[Row]) -> list[str]:
    """Everything that is wrong, as sentences; empty when the demonstration holds."""
    found = []
    for request, plain, row in zip(requests, eager, graphs, strict=True):
        if row.answer.distance(plain.answer) > TOLERANCE:
            found.append(f"{request.name}: the answer with graphs is not the eager one")
    if not any(row.statistics.replayed for row in graphs):
        found.append("no graph ran: the server's log counts no item as replayed")
    singles = [
        (request, row.answer)
        for request, row in zip(requests, graphs, strict=True)
        if request.is_single_photo
    ]
    for (first, one), (second, other) in itertools.combinations(singles, 2):
        if one.distance(other) <= TOLERANCE:
            found.append(f"{first.name} and {second.name} got the same log-probabilities")
    return found


def keep_files_in(folder: Path) -> None:
    """Have the servers write into `folder` what they would leave behind elsewhere."""
    os.environ.setdefault("VLLM_CACHE_ROOT", str(folder / "vllm"))
    temporary = folder / "tmp"
    if len(str(temporary)) <= LONGEST_TMPDIR:
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)


def verdict(num_requests: int, found: Sequence[str]) -> str:
    """The last line: whether the demonstration holds."""
    if found:
        return f"FAILED: {'; '.join(found)}"
    return f"OK: all {num_requests} answers and log-probabilities equal"


def main() -> int:
    """Run the demonstration; 0 if it holds."""
    # A server's last processes may still be ending, and writing, when the folder goes.
    with tempfile.TemporaryDirectory(prefix="vit-demo-", ignore_cleanup_errors=True) as folder:
        keep_files_in(Path(folder))
        say("making a tiny random Qwen2.5-VL and the requests")
        checkpoint = make_checkpoint("qwen2_5_vl", Path(folder) / "model")
        requests = make_requests()
        compilation = TWIN["compilation_config"] | {
            "encoder_cudagraph_token_budgets": TOKEN_BUDGETS
        }
        twin = TWIN | {"compilation_config": compilation}
        eager = serve_and_ask("stock vLLM, eager encoder", checkpoint, STOCK, requests)
        graphs = serve_and_ask("encoder graphs on the CPU twin", checkpoint, twin, requests)
    print_table(requests, eager, graphs)
    found = faults(requests, eager, graphs)
    replayed = sum(row.statistics.replayed for row in graphs)
    in_eager = sum(row.statistics.eager for row in graphs)
    print(f"{replayed} items through graphs, {in_eager} eager (token budgets: {TOKEN_BUDGETS})")
    print(verdict(len(requests), found))
    return 1 if found else 0


def _end(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)  # unwinds the `with` blocks, so no server is left behind


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the server has been stopped")
        sys.exit(130)
    except ServerError as error:
        sys.exit(f"FAILED: {error}")
