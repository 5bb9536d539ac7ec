# SPDX-License-Identifier: Apache-2.0
"""The real `vllm serve` three ways, measured by vLLM's own benchmark client: is ours faster?

    python benchmarks/serving.py                          # one H200: Qwen2.5-VL-7B, random weights
    python benchmarks/serving.py --loads twenty --rounds 5 --json serving.json --logs logs
    python benchmarks/serving.py --tiny                   # small, on the CPU twin: no figures

Servers that are up at the same time on one GPU, of which only one has requests at any time:

    eager   stock vLLM (this plugin is not loaded) without encoder graphs
    stock   stock vLLM with its own encoder CUDA graphs
    ours    vLLM with this plugin

Loads, in chat requests of crops of real photographs, none of which is sent to a server twice:

    twenty  20 images a request, all requests at once
    four    4 images a request, 4 requests a second
    one     1 image a request, 8 requests a second, twice as many requests

In each round every load runs on every way, the same requests, ways in random order. Figures are of
all rounds together. Encoder milliseconds are the worker's own (``encoder_clock.py``). Ends non-zero
where ours replayed no graph. Needs the ``test`` extra's scikit-image.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import towers_full_size
from PIL import Image
from serving_report import WAYS, Run, pooled, report

from vllm.vit_cudagraph.testing.photos import PHOTOS, image_url, photo
from vllm.vit_cudagraph.testing.serving import MODEL_NAME, STOCK, TWIN, Server

TINY_WAYS = ("eager", "ours")

PROMPT = "Describe what is seen in each picture, and what they have in common."
SIZES = ((224, 224), (336, 336), (448, 336), (512, 512), (640, 427), (640, 480))
TINY_SIZES = ((56, 56), (84, 112), (168, 112))
MOST_IMAGES = 20
WARM_UP = 4
"""Requests of each load that each server gets before anything is counted."""

READY_SECONDS = 300.0
METRICS_SECONDS = 2.5
"""Workers write their counts once a second."""


@dataclass(frozen=True)
class Load:
    """Images a request, requests a second, and how many requests to one of ``--requests``."""

    images: int
    rate: float
    times: int = 1


LOADS = {
    "twenty": Load(MOST_IMAGES, float("inf")),
    "four": Load(4, 4.0),
    "one": Load(1, 8.0, times=2),
}


class RequestsFailed(RuntimeError):
    """Not every request was answered in full; the message quotes the first that was not."""


# -- servers ---------------------------------------------------------------------------------------


def make_server(way: str, options: argparse.Namespace, folder: Path, logs: Path) -> Server:
    settings = tiny_settings(way) if options.tiny else gpu_settings(way, options)
    env = settings.pop("env") | {
        "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *_python_path()]),
    }
    return Server(
        folder,
        env=env if way == "ours" else env | STOCK["env"],
        limits={"image": MOST_IMAGES, "video": options.videos},
        arguments=["--worker-extension-cls=encoder_clock.EncoderClock"],
        log_path=logs / f"{way}.log",
        timeout=READY_SECONDS,
        **settings,
    )


def _python_path() -> list[str]:
    return [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


def gpu_settings(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Room for three servers on one GPU; nothing that could hide a run of the encoder."""
    return {
        "defaults": [
            "--load-format=dummy",
            "--dtype=bfloat16",
            "--max-model-len=16384",
            "--max-num-seqs=64",
            "--no-enable-prefix-caching",
            "--mm-processor-cache-gb=0",
            f"--gpu-memory-utilization={options.gpu_memory_utilization}",
            f"--kv-cache-memory-bytes={options.kv_gib * 2**30}",
            f"--api-server-count={options.api_server_count}",
            "--generation-config=vllm",
        ],
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_mm_encoder": way != "eager",
        },
        "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    }


def tiny_settings(way: str) -> dict[str, Any]:
    return dict(TWIN) if way == "ours" else {"env": {}}


@contextlib.contextmanager
def running(servers: dict[str, Server]) -> Iterator[dict[str, float]]:
    """All servers, started together; seconds until each was ready. None is left at the end."""
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            starts = {pool.submit(_start, server): way for way, server in servers.items()}
            ready = {}
            try:
                for start in as_completed(starts):
                    ready[starts[start]] = start.result()
            except BaseException:  # the others' waits end when their servers do
                stop(servers)
                raise
        yield {way: ready[way] for way in servers}
    finally:
        stop(servers)


def _start(server: Server) -> float:
    began = time.perf_counter()
    server.start()
    server.wait_ready()
    return time.perf_counter() - began


def stop(servers: dict[str, Server]) -> None:
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: server.stop(), servers.values()))


# -- requests --------------------------------------------------------------------------------------


@cache
def _photograph(name: str) -> Image.Image:
    return photo(name)


def picture(rng: random.Random, sizes: Sequence[tuple[int, int]]) -> str:
    """Some part of a photograph as the data URL of a JPEG of one of the sizes."""
    image, (width, height) = _photograph(rng.choice(sorted(PHOTOS))), rng.choice(sizes)
    share = rng.uniform(0.5, 0.95) * min(image.width / width, image.height / height)
    wide, high = width * share, height * share
    left, top = rng.uniform(0, image.width - wide), rng.uniform(0, image.height - high)
    box = (left, top, left + wide, top + high)
    return image_url(image.resize((width, height), Image.Resampling.BICUBIC, box=box), "JPEG")


def write_requests(
    path: Path, load: Load, count: int, seed: int, sizes: Sequence[tuple[int, int]]
) -> Path:
    """Requests for vLLM's data set ``custom_image``: a JSON object a line."""
    rng = random.Random(seed)
    with path.open("w") as lines:
        for _ in range(count):
            images = [picture(rng, sizes) for _ in range(load.images)]
            lines.write(json.dumps({"prompt": PROMPT, "image_files": images}) + "\n")
    return path


# -- vLLM's client ---------------------------------------------------------------------------------


def client_arguments(
    port: int, folder: Path, data: Path, count: int, rate: float, output_tokens: int, seed: int
) -> list[str]:
    """A command line of ``vllm bench serve``."""
    return [
        "--backend=openai-chat",
        "--endpoint=/v1/chat/completions",
        f"--base-url=http://127.0.0.1:{port}",
        f"--model={folder}",
        f"--served-model-name={MODEL_NAME}",
        f"--tokenizer={folder}",
        "--dataset-name=custom_image",
        f"--dataset-path={data}",
        "--disable-shuffle",
        f"--num-prompts={count}",
        f"--request-rate={rate}",
        f"--custom-output-len={output_tokens}",
        "--ignore-eos",
        "--temperature=0",
        f"--seed={seed}",
        "--save-detailed",
        "--disable-tqdm",
        "--ready-check-timeout-sec=0",
    ]


def ask(arguments: Sequence[str], log: Path) -> dict[str, Any]:
    """Run the client in this process; what it prints goes to `log`."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with log.open("a") as file, contextlib.redirect_stdout(file):
        return asyncio.run(main_async(parser.parse_args(list(arguments))))


def check_answers(result: dict[str, Any], count: int, output_tokens: int, where: str) -> None:
    """Raises `RequestsFailed` unless `count` requests got `output_tokens` each."""
    for error in result["errors"]:
        if error:
            raise RequestsFailed(f"{where}: a request failed: {error}")
    if result["completed"] != count or len(result["ttfts"]) != count:
        raise RequestsFailed(f"{where}: {result['completed']} of {count} requests were answered")
    for length in result["output_lens"]:
        if length != output_tokens:
            raise RequestsFailed(f"{where}: an answer has {length} tokens, not {output_tokens}")


def tpot_ms(itls: Sequence[Sequence[float]], output_lens: Sequence[int]) -> list[float]:
    """As the client has it: what came after the first token, over the tokens after it."""
    return [
        sum(gaps) / (length - 1) * 1e3
        for gaps, length in zip(itls, output_lens, strict=True)
        if length > 1
    ]


# -- the benchmark ---------------------------------------------------------------------------------


@dataclass
class Bench:
    """Servers that are up, and what has been asked of them."""

    servers: dict[str, Server]
    options: argparse.Namespace
    folder: Path
    scratch: Path
    client_log: Path
    runs: list[Run] = field(default_factory=list)
    sent: int = 0
    """Images to each server."""

    def run(self) -> None:
        for server in self.servers.values():
            server.worker_rpc("start_encoder_clock")
        for number in range(self.options.rounds + 1):
            for load in self.options.loads:
                self._round(number, load)

    def _round(self, number: int, name: str) -> None:
        """A load on every way; round 0 is the warm-up."""
        load, options = LOADS[name], self.options
        count = options.requests * load.times
        if number == 0:
            count = min(count, WARM_UP)
        seed = options.seed + 1000 * number + list(LOADS).index(name)
        sizes = TINY_SIZES if options.tiny else SIZES
        data = write_requests(self.scratch / "requests.jsonl", load, count, seed, sizes)
        self.sent += count * load.images
        ways = list(self.servers)
        random.Random(seed).shuffle(ways)
        for way in ways:
            run = self._one(number, name, way, data, count, seed)
            if number:
                self.runs.append(run)
                print(
                    f"round {number}, {name}, {way}: ttft {run.summary()['ttft_mean_ms']:.1f} ms, "
                    f"encoder {run.encoder_ms:.1f} ms",
                    flush=True,
                )

    def _one(self, number: int, load: str, way: str, data: Path, count: int, seed: int) -> Run:
        server, tokens = self.servers[way], self.options.output_tokens
        arguments = client_arguments(
            server.port, self.folder, data, count, LOADS[load].rate, tokens, seed
        )
        server.worker_rpc("read_encoder_clock")
        result = ask(arguments, self.client_log)
        try:
            check_answers(result, count, tokens, f"round {number}, {load}, {way}")
        except RequestsFailed as error:
            tail = "\n".join(server.log().splitlines()[-40:])
            raise RequestsFailed(f"{error}\nthe end of the server's log:\n{tail}") from None
        clocks = server.worker_rpc("read_encoder_clock")
        return Run(
            round=number,
            load=load,
            way=way,
            seconds=result["duration"],
            ttft_ms=[seconds * 1e3 for seconds in result["ttfts"]],
            tpot_ms=tpot_ms(result["itls"], result["output_lens"]),
            input_tokens=result["total_input_tokens"],
            output_tokens=result["total_output_tokens"],
            encoder_ms=sum(clock["ms"] for clock in clocks),
            encoder_batches=sum(clock["batches"] for clock in clocks),
        )

    def graphs(self) -> dict[str, dict[str, int]]:
        """What `/metrics` of ours says of all items sent."""
        if "ours" not in self.servers:
            return {}
        time.sleep(METRICS_SECONDS)
        metrics = self.servers["ours"].metrics()
        counts = {
            "replayed": metrics.get("items_replayed_total", 0.0),
            "eager": metrics.get("eager_items_total", 0.0),
            "graphs": metrics.get("captured_graphs", 0.0),
        }
        return {"ours": {"sent": self.sent} | {key: int(of) for key, of in counts.items()}}


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Bring the servers up, ask, and take them down."""
    from vllm import __version__

    logs = options.logs or scratch
    folder = towers_full_size.make_folder(
        "qwen2_5_vl", scratch / "model", text=towers_full_size.TEXT_7B, tiny=options.tiny
    )
    servers = {way: make_server(way, options, folder, logs) for way in options.ways}
    with running(servers) as ready:
        bench = Bench(servers, options, folder, scratch, logs / "client.log")
        bench.run()
        graphs = bench.graphs()
    return {
        "vllm": __version__,
        "device": device_name(options.tiny),
        "arguments": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        "ready_s": ready,
        "graphs": graphs,
        "pooled": pooled(bench.runs),
        "runs": [run.summary() for run in bench.runs],
    }


def device_name(tiny: bool) -> str:
    from vllm.platforms import current_platform  # asks NVML, so no context on the GPU

    return "CPU twin" if tiny else current_platform.get_device_name()


def rounded(figures: Any) -> Any:
    """Two decimals of a millisecond are plenty, and keep the file small."""
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [rounded(value) for value in figures]
    return round(figures, 2) if isinstance(figures, float) else figures


# -- the command line ------------------------------------------------------------------------------


def at_least_one(text: str) -> int:
    return _whole(text, 1)


def none_or_more(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on, such as 1")
    return int(text)


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Raises ``SystemExit`` with what would work, where options do not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=None)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument(
        "--requests", type=at_least_one, default=24, help="a load and round; `one` has twice these"
    )
    parser.add_argument("--output-tokens", type=at_least_one, default=32)
    parser.add_argument("--seed", type=none_or_more, default=0)
    parser.add_argument(
        "--videos", type=none_or_more, default=1, help="limit_mm_per_prompt of videos"
    )
    parser.add_argument("--api-server-count", type=at_least_one, default=2)
    parser.add_argument("--kv-gib", type=at_least_one, default=8, help="KV cache of each server")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.28)
    parser.add_argument("--tiny", action="store_true", help="the tests' small model on the twin")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.add_argument("--logs", type=Path, default=None, help="keep logs in this folder")
    options = parser.parse_args(arguments)
    options.ways = options.ways or list(TINY_WAYS if options.tiny else WAYS)
    # Each once: a way is a server, a load is a row of the table.
    options.ways, options.loads = (
        list(dict.fromkeys(options.ways)),
        list(dict.fromkeys(options.loads)),
    )
    if options.tiny and "stock" in options.ways:
        parser.error("--tiny has no stock graphs, which need a GPU: give --ways eager ours")
    if not 0.0 < options.gpu_memory_utilization < 1.0:
        parser.error("--gpu-memory-utilization is a share of the GPU a server: give 0.28")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder; give --json serving.json")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line(arguments)
    # A `timeout` in front of this must not leave servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if not options.tiny:
        check_gpu()
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(options, Path(scratch))
    print(report(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(rounded(figures)) + "\n")
    if "ours" in options.ways and not figures["graphs"]["ours"]["replayed"]:
        print("ours replayed no graph: these figures say nothing about it", file=sys.stderr)
        return 1
    return 0


def check_gpu() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise SystemExit("there is no GPU that vLLM can use: give --tiny for the CPU twin")


if __name__ == "__main__":
    sys.exit(main())
