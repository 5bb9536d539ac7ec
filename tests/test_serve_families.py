# SPDX-License-Identifier: Apache-2.0
"""Answers of the real `vllm serve` for further families: encoder graphs on the twin against eager.

One server a family, with graphs; the eager answers come from an offline engine in a child process
that runs stock vLLM while the server comes up. ``test_serve.py`` asks more of three families.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from eager_answers import EagerAnswers
from families import environment, serve_arguments
from test_serve import (
    QUESTION,
    TOKEN_BUDGETS,
    Case,
    assert_different,
    assert_equal,
    clip,
    picture,
    twin,
)

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.photos import photo
from vllm.vit_cudagraph.testing.serving import Answer, Server, image_part, text_part

pytestmark = pytest.mark.serve

FAMILIES = {
    "ernie45_vl": ("image", "video"),
    "glm4v": ("image", "video"),
    "kimi_vl": ("image",),
    "qwen3_5": ("image", "video"),
}
"""What the requests to each hold."""

#: Of the text model in plain torch, as the twin's worker has it too and says why.
ROTARY = '--compilation-config={"custom_ops": ["-rotary_embedding"]}'

#: In one shape: nothing but the pixels can tell them apart.
ALIKE = ("rocket", "astronaut", "chelsea", "coffee")


def make_cases(modalities: tuple[str, ...]) -> dict[str, Case]:
    """The requests; all of their items fit into the largest budget."""
    cases = {name: Case([image_part(photo(name, (224, 168))), QUESTION]) for name in ALIKE}
    cases["large"] = Case([picture("rocket"), QUESTION])
    cases["strip and small"] = Case([picture("hubble"), picture("coffee"), QUESTION], 2)
    if "video" in modalities:
        cases["video"] = Case([clip("rocket"), text_part("What happens?")])
    return cases


@dataclass
class Served:
    """A server of one family with graphs, and what eager vLLM answers to the same requests."""

    server: Server
    cases: dict[str, Case]
    eager: dict[str, Answer]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    family: str = request.param
    arguments = serve_arguments(family)
    checkpoint = make_checkpoint(family, tmp_path_factory.mktemp(family) / "model")
    cases = make_cases(FAMILIES[family])
    contents = [case.content for case in cases.values()]
    with environment(family):  # both take it from this process
        graphs = Server(checkpoint, arguments=arguments, **twin())
        eager = EagerAnswers(checkpoint, contents, (*arguments, ROTARY))
    try:
        with graphs as server:
            answers = dict(zip(cases, eager.collect(), strict=True))
            yield Served(server, cases, answers)
    finally:
        eager.stop()


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_answers_of_graphs_are_the_eager_ones(served: Served) -> None:
    assert f"Captured {len(TOKEN_BUDGETS)} encoder CUDA graphs" in served.server.log()
    answers = {}
    for name, case in served.cases.items():
        before = served.server.statistics()
        answers[name] = served.server.chat(case.content)
        counted = served.server.statistics().since(before)
        assert_equal(answers[name], served.eager[name], name)
        assert (counted.replayed, counted.eager) == (case.items, 0), name
        assert counted.replays > 0
    assert_different([answers[name] for name in ALIKE])


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_requests_at_the_same_time(served: Served) -> None:
    contents = [case.content for case in served.cases.values()]
    before = served.server.statistics()
    for answer, (name, expected) in zip(
        served.server.chat_together(contents), served.eager.items(), strict=True
    ):
        assert_equal(answer, expected, name)
    counted = served.server.statistics().since(before)
    items = sum(case.items for case in served.cases.values())
    assert (counted.replayed, counted.eager) == (items, 0)
    wait_for_metric(served.server, "items_replayed_total", served.server.statistics().replayed)


def wait_for_metric(server: Server, name: str, value: float) -> None:
    """Workers write what the API server shows, so it is about a second behind."""
    deadline = time.monotonic() + 30
    while server.metrics().get(name) != value:
        assert time.monotonic() < deadline, (server.metrics(), value)
        time.sleep(0.3)
