# SPDX-License-Identifier: Apache-2.0
"""The real `vllm serve` with two ranks on the twin: a tower that is split over them (vLLM's
default), and a whole one on each with a batch's items shared out (``mm_encoder_tp_mode=data``).
Answers are those of one rank that runs eagerly."""

import time
from collections import Counter
from pathlib import Path

import pytest
from eager_answers import EagerAnswers
from test_serve import QUESTION, TOKEN_BUDGETS, assert_equal, clip, picture, running, twin

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.photos import photo
from vllm.vit_cudagraph.testing.serving import Server, image_part, text_part

pytestmark = pytest.mark.serve

REQUESTS = {
    "one image": ([picture("rocket"), QUESTION], 1),
    "two images": ([picture("hubble"), picture("coffee"), QUESTION], 2),
    "a small one": ([image_part(photo("chelsea", (224, 168))), QUESTION], 1),
    "a video": ([clip("rocket"), text_part("What happens?")], 1),
}
"""Contents, and how many items each has."""


def items_by_rank(server: Server, total: int) -> Counter[str]:
    """What each rank has replayed, once that is ``total``: workers write it up to a second late."""
    deadline = time.monotonic() + 30
    while True:
        samples = server.metric_samples("items_replayed_total")
        counted: Counter[str] = Counter()
        for labels, value in samples:
            counted[labels["rank"]] += int(value)
        if counted.total() == total:
            return counted
        assert time.monotonic() < deadline, (samples, total)
        time.sleep(0.3)


def test_two_ranks_answer_as_one_eager_rank_does(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2_5_vl", tmp_path / "model")
    eager = EagerAnswers(checkpoint, [content for content, _ in REQUESTS.values()])
    split, shared = (
        Server(
            checkpoint,
            arguments=("--tensor-parallel-size=2", f"--mm-encoder-tp-mode={mode}"),
            **twin(),
        )
        for mode in ("weights", "data")
    )
    try:
        with running(split, shared):
            expected = dict(zip(REQUESTS, eager.collect(), strict=True))
            for server in (split, shared):
                captured = server.log().count(f"Captured {len(TOKEN_BUDGETS)} encoder CUDA graphs")
                assert captured == 2, server.log()[-3000:]
                for name, (content, _) in REQUESTS.items():
                    assert_equal(server.chat(content), expected[name], name)
            items = sum(count for _, count in REQUESTS.values())
            assert items_by_rank(split, 2 * items) == {"0": items, "1": items}
            shares = items_by_rank(shared, items)
            assert set(shares) == {"0", "1"}, shares
    finally:
        eager.stop()
