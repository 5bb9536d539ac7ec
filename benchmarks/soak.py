# SPDX-License-Identifier: Apache-2.0
"""A soak of the real `vllm serve` with encoder graphs on the CPU twin: does it stay right and up?

    python benchmarks/soak.py                            # 2000 requests from 8 clients
    python benchmarks/soak.py --requests 100 --log /tmp/server.log
    python benchmarks/soak.py --family qwen3_vl --malformed 0.2 --seed 7 --json soak.json
    python benchmarks/soak.py --stock                    # the same without graphs, for its memory

One server of a tiny random checkpoint gets chat requests from several clients at once: one to three
photographs of many shapes, or a video, or both, drawn by a seeded generator from a pool of distinct
requests. A share of them (`--malformed`) is broken, or its client hangs up. The server runs without
prefix cache and without cache of processed images, and vLLM then names each item of each request
afresh, so that the encoder runs for every item, repeated ones too.

WHAT IS COMPARED. Each request of the pool is asked once alone. Every later answer to it must have
the same tokens, and log-probabilities within `TOLERANCE`: batches differ, so roundings do. Where a
token differs, it passes as a near-tie only if its log-probability is within `TOLERANCE` of the one
expected there, and what follows it is not compared; near-ties are counted in the table.

WHAT IS CHECKED. Each good request is answered, and right; each broken one gets a 4xx; the server
lives, is healthy and has no request left; items replayed and eager on `/metrics` are together what
was sent, where those of a client that hung up may or may not count; graphs were replayed; no
process grows in the second half; no two requests of the pool have the same answer, or the
comparison would say nothing.

MEMORY is what each process has for itself: its resident set without files and shared memory. The
ring through which the engine talks to its workers is shared memory; its 160 MiB become resident as
it is gone round, in both processes, and no more than that. `ALLOCATOR` takes away what else grows
in stock vLLM as well: freed tensors that glibc keeps, and oneDNN's cache of shapes. `--allocator
default` leaves both as they are, and then the check of memory may fail without a leak.

Ends non-zero where a check fails. Needs the ``test`` extra's scikit-image.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from vllm.vit_cudagraph.testing.checkpoints import FAMILIES, make_checkpoint
from vllm.vit_cudagraph.testing.photos import (
    PHOTOS,
    data_url,
    image_url,
    panning_frames,
    photo,
    video_url,
)
from vllm.vit_cudagraph.testing.serving import (
    MODEL_NAME,
    STOCK,
    TWIN,
    Answer,
    RequestError,
    Server,
    ServerError,
    image_part,
    text_part,
    video_part,
)

TOLERANCE = 1e-3
"""Of a log-probability, between a request that was alone and the same one in some batch."""

TOKEN_BUDGETS = [64, 128, 256, 512]
"""The largest photographs make up to 640 tokens: those run eagerly, beside the graphs."""

POOL_SIZE = 40
MAX_TOKENS = 4
LONG_ANSWER = 64
"""Tokens asked for by a client that hangs up, so that the server is still busy with it then."""

ALLOCATOR = {
    # glibc raises this threshold to the size of what was freed (up to 32 MiB), and takes tensors
    # from the heap from then on; small blocks between them keep the holes from going back.
    "MALLOC_MMAP_THRESHOLD_": "131072",
    # Each number of rows makes a primitive for each shape of weights; 1024 of them by default.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}
"""Environment of the server, so that memory in use and resident memory are the same."""

SAMPLES = 20
MOST_GROWTH_MIB = 24.0
"""Of one process in the second half of the soak."""

GOOD = "good"
HANG_UPS = ("hang-up after body", "hang-up inside body")
MALFORMED = (
    "broken base64",
    "truncated JPEG",
    "truncated PNG",
    "unknown image format",
    "not JSON",
    "no messages",
    *HANG_UPS,
)

Part = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Parts of a chat message, and how many vision items they hold."""

    content: list[Part]
    items: int


@dataclass(frozen=True)
class Job:
    """One request to send: a kind, which request of the pool, and a seed for what else varies."""

    kind: str
    index: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `problem` is empty where all is as it should be."""

    job: Job
    problem: str = ""
    answered: bool = False
    distance: float = 0.0
    near_tie: bool = False


@dataclass(frozen=True)
class Memory:
    """MiB of the server's processes, which are the only children of this one.

    Attributes:
        resident: The sum of their resident sets; what they share counts more than once.
        private: What each has for itself, by name.
    """

    resident: float
    private: dict[str, float]

    @classmethod
    def now(cls) -> Memory:
        resident, private = 0.0, defaultdict[str, float](float)
        for process in psutil.Process().children(recursive=True):
            try:
                name, taken = process.name(), process.memory_info()
            except psutil.NoSuchProcess:
                continue
            resident += taken.rss / 2**20
            private[name] += (taken.rss - taken.shared) / 2**20
        return cls(resident, dict(private))


@dataclass(frozen=True)
class Counts:
    """Vision items on `/metrics`, and requests that the engine still has."""

    replayed: int
    replays: int
    eager: dict[str, int]
    unfinished: int

    @property
    def items(self) -> int:
        return self.replayed + sum(self.eager.values())


# -- what is sent ----------------------------------------------------------------------------------


def make_pool(rng: random.Random) -> list[Request]:
    """Distinct requests. The first one is larger than every token budget, so it runs eagerly."""
    question = text_part("What is in the picture?")
    pool = [Request([image_part(photo("retina"), "JPEG"), question], 1)]
    while len(pool) < POOL_SIZE:
        form = rng.random()
        parts = [_clip(rng)] if form < 0.25 else []
        if form > 0.15:
            parts += [_picture(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        pool.append(
            Request([*parts, text_part(f"Question {len(pool)}: what is seen?")], len(parts))
        )
    return pool


def _picture(rng: random.Random) -> Part:
    size = (rng.randint(30, 700), rng.randint(30, 500))
    return image_part(photo(rng.choice(sorted(PHOTOS)), size), rng.choice(("PNG", "JPEG")))


def _clip(rng: random.Random) -> Part:
    size = (rng.randrange(56, 280, 2), rng.randrange(56, 200, 2))
    frames = panning_frames(rng.choice(sorted(PHOTOS)), rng.choice((4, 6, 8)), size)
    return video_part(video_url(frames))


def make_jobs(rng: random.Random, requests: int, malformed: float) -> list[Job]:
    """The kinds of malformed requests in turn, at random places."""
    bad = round(requests * malformed)
    kinds = [MALFORMED[i % len(MALFORMED)] for i in range(bad)] + [GOOD] * (requests - bad)
    rng.shuffle(kinds)
    return [Job(kind, rng.randrange(POOL_SIZE), rng.randrange(1 << 30)) for kind in kinds]


def malformed_body(job: Job, pool: Sequence[Request]) -> bytes:
    """The body of a request that is refused; beside the broken image it has good ones."""
    rng = random.Random(job.seed)
    content = pool[job.index].content
    if job.kind == "not JSON":
        whole = encode(content)
        return whole[: rng.randint(1, len(whole) - 1)]
    if job.kind == "no messages":
        return json.dumps({"model": MODEL_NAME, "messages": []}).encode()
    broken = {"type": "image_url", "image_url": {"url": _broken_url(job.kind, rng)}}
    return encode([*content, broken])


def _broken_url(kind: str, rng: random.Random) -> str:
    if kind == "broken base64":
        return "data:image/png;base64,%%% this is not base64 %%%"
    if kind == "unknown image format":
        return data_url("image/x-unknown", rng.randbytes(500))
    url = image_url(photo("coffee", (300, 200)), kind.removeprefix("truncated "))
    # A multiple of four characters: the base64 stays whole, so it is the image that is cut.
    return url[: url.index(",") + 1 + len(url) * rng.randint(5, 90) // 400 * 4]


def encode(content: Sequence[Part], max_tokens: int = MAX_TOKENS) -> bytes:
    """The body of a chat request."""
    message = {"role": "user", "content": list(content)}
    return json.dumps(
        {
            "model": MODEL_NAME,
            "messages": [message],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": True,
        }
    ).encode()


# -- the soak --------------------------------------------------------------------------------------


@dataclass
class Soak:
    """Sends the jobs to a server; samples its memory as they come back."""

    server: Server
    pool: list[Request]
    step: int
    stock: bool = False
    references: list[Answer] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_references(self) -> None:
        """Each request of the pool alone; memory is sampled from here on."""
        self.references = [self._chat(request) for request in self.pool]
        self.memory.append(Memory.now())

    def run(self, jobs: Sequence[Job], clients: int) -> list[Outcome]:
        with ThreadPoolExecutor(clients) as executor:
            return list(executor.map(self._send, jobs))

    def _send(self, job: Job) -> Outcome:
        try:
            if job.kind == GOOD:
                outcome = self._good(job)
            elif job.kind in HANG_UPS:
                outcome = self._hang_up(job)
            else:
                outcome = self._malformed(job)
        except Exception as error:  # whatever it is, the request was lost, and the soak goes on
            outcome = Outcome(job, f"lost: {type(error).__name__}: {str(error)[:200]}")
        with self.lock:
            self.done += 1
            if self.done % self.step == 0:
                self.memory.append(Memory.now())
        return outcome

    def _chat(self, request: Request) -> Answer:
        return self.server.chat(request.content, max_tokens=MAX_TOKENS)

    def _good(self, job: Job) -> Outcome:
        try:
            answer = self._chat(self.pool[job.index])
        except RequestError as error:
            return Outcome(job, f"refused: {str(error)[:200]}")
        return compare(job, answer, self.references[job.index])

    def _malformed(self, job: Job) -> Outcome:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            body = malformed_body(job, self.pool)
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if 400 <= response.status < 500:
            return Outcome(job, answered=True)
        return Outcome(job, f"HTTP {response.status} in place of 4xx: {text[:200]}", answered=True)

    def _hang_up(self, job: Job) -> Outcome:
        rng = random.Random(job.seed)
        body = encode(self.pool[job.index].content, LONG_ANSWER)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        if job.kind == "hang-up inside body":
            body = body[: rng.randrange(len(body))]
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=120) as connection:
            connection.sendall(head.encode() + body)
            # So that some leave while images are read, some in the encoder, some while decoding.
            time.sleep(rng.uniform(0.0, 0.5))
        return Outcome(job)


def compare(job: Job, answer: Answer, expected: Answer) -> Outcome:
    """Hold an answer against the one that was given alone, up to a near-tie of two tokens."""
    if answer.prompt_tokens != expected.prompt_tokens:
        return Outcome(job, "wrong: another number of prompt tokens", answered=True)
    if len(answer.token_ids) != len(expected.token_ids):
        return Outcome(job, "wrong: another number of tokens", answered=True)
    distance = 0.0
    for i, token in enumerate(answer.token_ids):
        difference = abs(answer.logprobs[i] - expected.logprobs[i])
        # Not `> TOLERANCE`, which is false for NaN.
        if not difference <= TOLERANCE:
            problem = f"wrong: request {job.index}, token {i}: log-probability off {difference:.2e}"
            return Outcome(job, problem, answered=True)
        distance = max(distance, difference)
        if token != expected.token_ids[i]:
            return Outcome(job, answered=True, distance=distance, near_tie=True)
    return Outcome(job, answered=True, distance=distance)


def same(one: Answer, other: Answer) -> bool:
    """Whether a mix-up of these two answers could go unnoticed."""
    return one.prompt_tokens == other.prompt_tokens and one.distance(other) <= TOLERANCE


def read_counts(server: Server) -> Counts:
    """`/metrics` now; `Server.metrics` adds reasons up, and has no numbers of vLLM itself."""
    url = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    replayed = replays = unfinished = 0
    eager: Counter[str] = Counter()
    for sample in samples:
        if sample.name == "vllm:encoder_cudagraph_items_replayed_total":
            replayed += int(sample.value)
        elif sample.name == "vllm:encoder_cudagraph_replays_total":
            replays += int(sample.value)
        elif sample.name == "vllm:encoder_cudagraph_eager_items_total":
            eager[sample.labels["reason"]] += int(sample.value)
        elif sample.name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            unfinished += int(sample.value)
    return Counts(replayed, replays, dict(eager), unfinished)


def settled_counts(server: Server, seconds: float = 60.0) -> Counts:
    """Counts once nothing runs and they have stopped: workers write them once a second."""
    counts, deadline = read_counts(server), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(3.0)
        before, counts = counts, read_counts(server)
        if before == counts and not counts.unfinished:
            break
    return counts


# -- the verdict -----------------------------------------------------------------------------------


def item_bounds(soak: Soak, outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Fewest and most vision items that may have reached the encoder.

    Refused requests have reached it with none, and so has a body that did not arrive in full.
    """
    least = sum(request.items for request in soak.pool)  # the references
    most = least
    for outcome in outcomes:
        items = soak.pool[outcome.job.index].items
        if outcome.job.kind == GOOD:
            least += items if outcome.answered else 0
            most += items
        elif outcome.job.kind == "hang-up after body":
            most += items
    return least, most


def growth_mib(memory: Sequence[Memory]) -> dict[str, float]:
    """By process, from the middle of the soak to its end; each end is a median of three samples,
    since one varies with what happens to be in flight."""
    middle = max(len(memory) // 2, 1)
    ends = memory[middle - 1 : middle + 2], memory[-3:]
    grown = {}
    for name in memory[0].private:
        before, after = (statistics.median(m.private.get(name, 0.0) for m in end) for end in ends)
        grown[name] = after - before
    return grown


def find_failures(
    soak: Soak, outcomes: Sequence[Outcome], before: Counts, after: Counts
) -> list[str]:
    """Every check that does not hold, in words."""
    problems = Counter(f"{o.job.kind}: {o.problem}" for o in outcomes if o.problem)
    failures = [f"{count} x {problem}" for problem, count in problems.most_common(20)]
    if not soak.server.is_running():
        failures.append("the server's process has ended")
    if not soak.server.is_healthy():
        failures.append("/health does not answer 200")
    alike = [pair for pair in itertools.combinations(soak.references, 2) if same(*pair)]
    if alike:
        failures.append(f"{len(alike)} pairs of different requests have the same answer")
    if after.unfinished:
        failures.append(f"{after.unfinished} requests are left in the engine")
    if not soak.stock:
        failures += find_miscounts(soak, outcomes, before, after)
    for name, grown in growth_mib(soak.memory).items():
        if grown > MOST_GROWTH_MIB:
            failures.append(f"{name} grew by {grown:.0f} MiB in the second half")
    return failures


def find_miscounts(
    soak: Soak, outcomes: Sequence[Outcome], before: Counts, after: Counts
) -> list[str]:
    """Checks of `/metrics`, where stock vLLM has no counts of vision items."""
    failures = []
    if after.replayed == before.replayed:
        failures.append("no item went through a graph")
    counted, (least, most) = after.items - before.items, item_bounds(soak, outcomes)
    if not least <= counted <= most:
        failures.append(f"/metrics counts {counted} items; {least} to {most} were sent")
    return failures


def quarter_points(samples: Sequence[float]) -> list[float]:
    """The samples at the start, after each quarter, and at the end."""
    last = len(samples) - 1
    return [round(samples[last * quarter // 4], 1) for quarter in range(5)]


def memory_figures(memory: Sequence[Memory]) -> dict[str, Any]:
    """Memory in `figures`."""
    private = {name: [m.private.get(name, 0.0) for m in memory] for name in memory[0].private}
    return {
        "rss_mib_quarters": quarter_points([m.resident for m in memory]),
        "private_mib_quarters": {name: quarter_points(each) for name, each in private.items()},
        "private_mib_growth": {name: round(mib, 1) for name, mib in growth_mib(memory).items()},
        "private_mib_samples": {
            name: [round(sample, 1) for sample in each] for name, each in private.items()
        },
    }


def figures(
    soak: Soak, outcomes: Sequence[Outcome], before: Counts, after: Counts, seconds: float
) -> dict[str, Any]:
    """What the table shows and `--json` writes."""
    kinds = Counter(outcome.job.kind for outcome in outcomes)
    eager = {reason: n - before.eager.get(reason, 0) for reason, n in after.eager.items()}
    return {
        "requests": len(outcomes),
        "good": kinds[GOOD],
        "good_answered": sum(o.answered for o in outcomes if o.job.kind == GOOD),
        "malformed": {kind: kinds[kind] for kind in MALFORMED},
        "problems": sum(bool(outcome.problem) for outcome in outcomes),
        "near_ties": sum(outcome.near_tie for outcome in outcomes),
        "largest_distance": max((outcome.distance for outcome in outcomes), default=0.0),
        "seconds": round(seconds, 1),
        "requests_per_second": round(len(outcomes) / seconds, 2),
        "references": len(soak.references),
        "items_replayed": after.replayed - before.replayed,
        "replays": after.replays - before.replays,
        "items_eager": eager,
        "items_bounds": item_bounds(soak, outcomes),
        **memory_figures(soak.memory),
        "tracebacks_in_log": soak.server.log().count("Traceback (most recent call last)"),
    }


def print_table(result: dict[str, Any]) -> None:
    """The figures, a line each."""
    least, most = result["items_bounds"]
    rows: list[tuple[str, Any]] = [
        ("requests", f"{result['requests']} and {result['references']} references before"),
        ("good, answered", f"{result['good']}, {result['good_answered']}"),
        *((f"malformed: {kind}", count) for kind, count in result["malformed"].items()),
        ("requests with a problem", result["problems"]),
        ("near-ties", result["near_ties"]),
        ("largest log-probability difference", f"{result['largest_distance']:.1e}"),
        ("seconds", result["seconds"]),
        ("requests/s", result["requests_per_second"]),
        ("items replayed", f"{result['items_replayed']} in {result['replays']} replays"),
        *((f"items eager: {reason}", count) for reason, count in result["items_eager"].items()),
        ("items expected", f"{least} to {most}"),
        ("all RSS in MiB at 0, 25, 50, 75, 100 %", result["rss_mib_quarters"]),
        *((f"private: {name}", mib) for name, mib in result["private_mib_quarters"].items()),
        *((f"growth: {name}", f"{mib} MiB") for name, mib in result["private_mib_growth"].items()),
        ("tracebacks in the server's log", result["tracebacks_in_log"]),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def server_settings(options: argparse.Namespace) -> dict[str, Any]:
    """How `Server` is started: with graphs or stock, and with which allocator."""
    settings = STOCK if options.stock else TWIN
    if not options.stock:
        given = {"encoder_cudagraph_token_budgets": TOKEN_BUDGETS}
        settings = settings | {"compilation_config": settings["compilation_config"] | given}
    allocator = ALLOCATOR if options.allocator == "plain" else {}
    return settings | {"env": settings["env"] | allocator}


def soak_server(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the server, send everything, and return the figures with the failed checks."""
    rng = random.Random(options.seed)
    checkpoint = make_checkpoint(options.family, folder / "model", seed=options.seed)
    pool = make_pool(rng)
    jobs = make_jobs(rng, options.requests, options.malformed)
    log_path = options.log or folder / "server.log"
    with Server(checkpoint, log_path=log_path, **server_settings(options)) as server:
        step = max(1, options.requests // SAMPLES)
        soak = Soak(server, pool, step, stock=options.stock)
        before = read_counts(server)
        soak.ask_references()
        start = time.monotonic()
        outcomes = soak.run(jobs, options.clients)
        seconds = time.monotonic() - start
        # A server that is gone has no counts; the checks say that it is gone.
        after = settled_counts(server) if server.is_healthy() else before
        result = figures(soak, outcomes, before, after, seconds)
        return result | {"failures": find_failures(soak, outcomes, before, after)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8, help="that send at the same time")
    parser.add_argument("--malformed", type=float, default=0.1, help="share of the requests")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl")
    parser.add_argument("--stock", action="store_true", help="vLLM without graphs")
    parser.add_argument("--allocator", choices=("plain", "default"), default="plain")
    parser.add_argument("--seed", type=int, default=0, help="of weights and requests")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--log", type=Path, help="file that keeps the server's output")
    options = parser.parse_args(arguments)
    if options.requests < 1 or options.clients < 1 or not 0.0 <= options.malformed <= 1.0:
        parser.error("--requests and --clients start at 1, --malformed is from 0 to 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, print its table, and return the exit status."""
    options = parse(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = soak_server(options, Path(folder))
    except (RequestError, ServerError) as error:
        # It did not come up, or gave no reference; without either there is nothing to compare.
        print(f"FAILED: before the soak: {error}")
        return 1
    print_table(result)
    if options.json is not None:
        options.json.write_text(json.dumps(vars_of(options) | result, indent=2) + "\n")
    for failure in result["failures"]:
        print(f"FAILED: {failure}")
    if not result["failures"]:
        print("OK: every check holds")
    return 1 if result["failures"] else 0


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run, for the JSON file."""
    names = ("clients", "family", "seed", "stock", "allocator")
    return {name: getattr(options, name) for name in names} | {"share_malformed": options.malformed}


if __name__ == "__main__":
    sys.exit(main())
