# SPDX-License-Identifier: Apache-2.0
"""Answers of the real `vllm serve`: encoder graphs on the twin against stock vLLM.

Texts of random weights are weak evidence, so every log-probability is compared, different
photographs must give different ones, and a planted fault must make the comparison fail. Servers
are the cost: one pair a family, shared by all tests, started side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.photos import data_url, panning_frames, photo, video_url
from vllm.vit_cudagraph.testing.serving import (
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

pytestmark = pytest.mark.serve

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TOKEN_BUDGETS = [64, 128, 256, 512]
TOLERANCE = 1e-4  # of a log-probability: equal to 4 decimals
QUESTION = text_part("What is in the picture?")

METRICS = (
    "items_replayed_total",
    "eager_items_total",
    "replays_total",
    "padding_tokens_total",
    "captured_graphs",
)

PHOTOGRAPHS = {
    "rocket": (640, 427),
    "astronaut": (224, 224),
    "chelsea": (301, 199),
    "coffee": (56, 56),
    "motorcycle": (700, 84),  # strips, whose windows are cut by the border
    "hubble": (56, 560),
    "camera": (30, 30),  # one merged token after resizing
}


@dataclass(frozen=True)
class Case:
    """A chat message and how many vision items it holds."""

    content: list[dict[str, Any]]
    items: int = 1


def picture(name: str, image_format: str = "PNG") -> dict[str, Any]:
    """The photograph `name` in its shape of `PHOTOGRAPHS`."""
    return image_part(photo(name, PHOTOGRAPHS[name]), image_format)


def clip(name: str, num_frames: int = 8) -> dict[str, Any]:
    """A short video that pans over the photograph `name`."""
    return video_part(video_url(panning_frames(name, num_frames, (224, 168))))


def make_cases() -> dict[str, Case]:
    """The requests; all of their items fit into `TOKEN_BUDGETS`."""
    cases = {name: Case([picture(name), QUESTION]) for name in PHOTOGRAPHS}
    cases["jpeg"] = Case([picture("rocket", "JPEG"), QUESTION])
    cases["three photographs"] = Case([*map(picture, ("astronaut", "chelsea", "coffee"))], 3)
    cases["same photograph twice"] = Case([picture("chelsea"), picture("chelsea"), QUESTION], 2)
    cases["text between"] = Case(
        [text_part("Is"), picture("hubble"), text_part("like"), picture("motorcycle"), QUESTION], 2
    )
    cases["video"] = Case([clip("rocket"), text_part("What happens?")])
    cases["photograph and video"] = Case([picture("coffee"), clip("coffee", 6), QUESTION], 2)
    return cases


CASES = make_cases()


def twin(**compilation: Any) -> dict[str, Any]:
    """Settings of a server with graphs on the twin, with more of `--compilation-config`."""
    config = TWIN["compilation_config"] | {"encoder_cudagraph_token_budgets": TOKEN_BUDGETS}
    return TWIN | {"compilation_config": config | compilation}


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers side by side, because most of a start is waiting for one core."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()
        yield


@dataclass
class Pair:
    """Two servers of one checkpoint."""

    family: str
    checkpoint: Path
    eager: Server
    graphs: Server

    def eager_answer(self, case: str) -> Answer:
        return self.eager.chat(CASES[case].content)


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint = make_checkpoint(family, folder / "model")
    eager = Server(checkpoint, log_path=folder / "eager.log", **STOCK)
    graphs = Server(checkpoint, log_path=folder / "graphs.log", **twin())
    with running(eager, graphs):
        yield Pair(family, checkpoint, eager, graphs)


every_family = pytest.mark.parametrize("pair", FAMILIES, indirect=True)
one_family = pytest.mark.parametrize("pair", ["qwen2_5_vl"], indirect=True)


def assert_equal(answer: Answer, expected: Answer, name: str) -> None:
    """Hold an answer against stock vLLM's: tokens exactly, log-probabilities to 4 decimals."""
    assert answer.prompt_tokens == expected.prompt_tokens, name
    assert answer.token_ids == expected.token_ids, name
    distance = answer.distance(expected)
    assert distance <= TOLERANCE, f"{name}: log-probabilities differ by {distance:.2e}"


def assert_different(answers: Sequence[Answer]) -> None:
    """No two answers have the same log-probabilities."""
    for one, other in itertools.combinations(answers, 2):
        assert one.distance(other) > 10 * TOLERANCE


@every_family
@pytest.mark.parametrize("case", CASES)
def test_graph_answer_is_the_eager_one(pair: Pair, case: str) -> None:
    before = pair.graphs.statistics()
    answer = pair.graphs.chat(CASES[case].content)
    counted = pair.graphs.statistics().since(before)
    assert_equal(answer, pair.eager_answer(case), case)
    assert counted.replayed == CASES[case].items
    assert counted.replays > 0
    assert counted.eager == 0


@every_family
def test_different_photographs_give_different_answers(pair: Pair) -> None:
    # One shape for all: nothing but the pixels can tell them apart.
    contents = [[image_part(photo(name, (224, 168))), QUESTION] for name in PHOTOGRAPHS]
    assert_different([pair.graphs.chat(content) for content in contents])


@every_family
def test_requests_at_the_same_time_share_replays(pair: Pair) -> None:
    names = [*PHOTOGRAPHS, "video"]
    expected = [pair.eager_answer(name) for name in names]
    shared = False
    for _ in range(5):  # the scheduler decides which requests meet in one batch
        before = pair.graphs.statistics()
        answers = pair.graphs.chat_together([CASES[name].content for name in names])
        counted = pair.graphs.statistics().since(before)
        for name, answer, eager in zip(names, answers, expected, strict=True):
            assert_equal(answer, eager, name)
        assert (counted.replayed, counted.eager) == (len(names), 0)
        shared = shared or counted.replays < counted.replayed
    assert shared, "no replay held more than one item in five rounds"


@every_family
def test_item_above_every_budget_runs_eagerly_and_is_counted(pair: Pair) -> None:
    content = [image_part(photo("retina"), "JPEG"), QUESTION]
    before = pair.graphs.statistics()
    answer = pair.graphs.chat(content)
    counted = pair.graphs.statistics().since(before)
    assert answer.prompt_tokens > TOKEN_BUDGETS[-1]
    assert_equal(answer, pair.eager.chat(content), "retina")
    assert (counted.replayed, counted.eager) == (0, 1)
    assert "larger than every token budget: 1" in counted.reasons


@every_family
def test_metrics_agree_with_the_log(pair: Pair) -> None:
    """Workers write what the API server shows, so it is about a second behind."""
    for name in ("rocket", "three photographs", "video"):
        pair.graphs.chat(CASES[name].content)
    logged, deadline = pair.graphs.statistics(), time.monotonic() + 30
    shown: dict[str, float] = {}
    while shown.get("items_replayed_total") != logged.replayed and time.monotonic() < deadline:
        time.sleep(0.3)
        shown = pair.graphs.metrics()
    assert logged.replayed > 0
    assert {name: shown.get(name, 0.0) for name in METRICS} == {
        "items_replayed_total": logged.replayed,
        "eager_items_total": logged.eager,
        "replays_total": logged.replays,
        "padding_tokens_total": logged.padding,
        "captured_graphs": len(TOKEN_BUDGETS),
    }
    assert 0 < shown["timed_replays_total"] <= logged.replays
    assert shown["measured_milliseconds_total"] > 0
    assert shown["predicted_milliseconds_total"] > 0
    assert pair.eager.metrics() == {}


@every_family
def test_stock_server_has_no_graphs(pair: Pair) -> None:
    # Otherwise both sides of every comparison above would be the same code.
    assert "Encoder CUDA graphs" not in pair.eager.log()
    assert "Captured 4 encoder CUDA graphs" in pair.graphs.log()


@one_family
def test_bad_input_is_refused_and_the_server_lives_on(pair: Pair) -> None:
    broken = {"type": "image_url", "image_url": {"url": data_url("image/png", b"no image")}}
    not_a_video = video_part(data_url("video/mp4", b"no video"))
    too_many = [picture("coffee")] * 9
    too_thin = image_part(photo("coffee", (600, 2)))  # the processor takes ratios up to 200
    for content in ([broken, QUESTION], [not_a_video], too_many, [too_thin]):
        with pytest.raises(RequestError) as refused:
            pair.graphs.chat(content)
        assert refused.value.status == 400
    assert pair.graphs.is_healthy()
    assert_equal(pair.graphs.chat(CASES["rocket"].content), pair.eager_answer("rocket"), "after")


@one_family
def test_planted_fault_limits_of_zero_and_not_asked_for(pair: Pair, tmp_path: Path) -> None:
    """Four more servers, side by side for the sake of time."""
    python_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    planted_settings = twin() | {
        "worker_cls": "planted_worker.StaleOffsetsWorker",
        "env": TWIN["env"] | {"PYTHONPATH": python_path.rstrip(os.pathsep)},
    }
    planted = Server(pair.checkpoint, log_path=tmp_path / "planted.log", **planted_settings)
    no_images = Server(pair.checkpoint, limits={"image": 0, "video": 1}, **twin())
    no_videos = Server(pair.checkpoint, limits={"image": 2, "video": 0}, **twin())
    not_asked = Server(pair.checkpoint)  # the plugin is there, the flag is off
    with running(planted, no_images, no_videos, not_asked):
        check_stale_offsets_are_noticed(pair, planted)
        check_limit_of_zero(pair, no_images, refused="rocket", served="video")
        check_limit_of_zero(pair, no_videos, refused="video", served="rocket")
        check_not_asked_for(pair, not_asked)


def check_not_asked_for(pair: Pair, server: Server) -> None:
    """Installed and not asked for: stock answers to the last bit, and not a line in the log."""
    for name in ("rocket", "three photographs", "video"):
        answer, expected = server.chat(CASES[name].content), pair.eager_answer(name)
        assert answer.token_ids == expected.token_ids and answer.distance(expected) == 0.0
    assert "vit_cudagraph" not in server.log() and "Encoder CUDA graphs" not in server.log()


def check_stale_offsets_are_noticed(pair: Pair, planted: Server) -> None:
    """The comparison passes for the first batch of a graph and fails for the next."""
    assert_equal(planted.chat(CASES["rocket"].content), pair.eager_answer("rocket"), "first")
    # The same token budget and a few rows less, cut into windows at other places.
    second = [image_part(photo("chelsea", (500, 500))), QUESTION]
    answer, expected = planted.chat(second), pair.eager.chat(second)
    assert (planted.statistics().replayed, planted.statistics().eager) == (2, 0)
    # A plausible answer: nothing but the comparison tells that it is wrong.
    assert all(map(math.isfinite, answer.logprobs))
    assert answer.distance(expected) > 10 * TOLERANCE
    with pytest.raises(AssertionError):
        assert_equal(answer, expected, "second")


def check_limit_of_zero(pair: Pair, server: Server, *, refused: str, served: str) -> None:
    """The modality with limit 0 gets HTTP 400, the other one a graph."""
    with pytest.raises(RequestError) as error:
        server.chat(CASES[refused].content)
    assert error.value.status == 400
    assert_equal(server.chat(CASES[served].content), pair.eager_answer(served), served)
    counted = server.statistics()
    assert (counted.replayed, counted.eager) == (1, 0)
    assert server.is_healthy()


def test_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    server = Server(tmp_path, **STOCK)
    server.start()
    process = server._process
    assert process is not None
    try:
        with pytest.raises(ServerError, match="no_such_model"):
            server.wait_ready()
    finally:
        server.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
