# SPDX-License-Identifier: Apache-2.0
"""One modality that has images and video chunks in one batch, as Kimi-K2.5's ``vision_chunk``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import managers
import pytest

from vllm.config import set_current_vllm_config
from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.testing import models, synthetic

MIXED = [[1, 8, 8], [4, 4, 6], [1, 4, 4], [2, 6, 6], [1, 4, 10]]
"""Three images, two video chunks: 16, 24, 4, 18 and 10 tokens."""


class Chunks(synthetic.SyntheticModel):
    """The synthetic tower, behind one modality for both kinds of items."""

    def vit_geometry(self) -> ViTGeometry:
        return replace(super().vit_geometry(), modalities=("vision_chunk",))


@pytest.fixture(params=["frame", "item"])
def served(request: pytest.FixtureRequest) -> Any:
    config = managers.config("qwen2_vl")
    with set_current_vllm_config(config):
        models.one_rank()
    model = synthetic.make_synthetic(config=config, sequences=request.param, window_side=3)
    model.__class__ = Chunks
    return model


def run(served: Any, frames: int | None = None) -> Any:
    """A manager that has run the mixed batch, every output held against the eager path."""
    manager = managers.make_manager(
        "qwen2_vl", budgets=[16, 100], items=8, frames=frames, of=served
    )
    kwargs = batch(served, MIXED)
    managers.assert_same(managers.run(manager, kwargs), managers.eager(served, kwargs))
    return manager


def batch(served: Any, grids: Sequence[Sequence[int]]) -> dict[str, Any]:
    made = managers.batch(served, grids)
    return {
        "pixel_values_vision_chunks": made["pixel_values"],
        "vision_chunk_grid_thw": made["image_grid_thw"],
    }


def test_images_and_video_chunks_share_replays(served: Any) -> None:
    manager = run(served)
    assert manager.supports_modality("vision_chunk") and not manager.supports_modality("video")
    assert manager.graph_hits == len(MIXED) and manager.statistics.replays.total() == 1


@pytest.mark.parametrize("limit, eager", [(6, 0), (3, 1), (1, 2)])
def test_a_limit_on_frames_holds_for_the_chunks_alone(served: Any, limit: int, eager: int) -> None:
    manager = run(served, frames=limit)
    reasons = {"more video frames than encoder_cudagraph_max_frames_per_batch": eager}
    assert dict(manager.statistics.eager) == (reasons if eager else {})
    assert manager.graph_hits == len(MIXED) - eager


def test_only_images_in_such_a_batch(served: Any) -> None:
    manager = managers.make_manager("qwen2_vl", budgets=[100], items=8, frames=1, of=served)
    kwargs = batch(served, [[1, 4, 4]] * 6)
    managers.assert_same(managers.run(manager, kwargs), managers.eager(served, kwargs))
    assert manager.graph_hits == 6
    assert manager.statistics.replays.total() == 1  # as frames they would be six
