# SPDX-License-Identifier: Apache-2.0
"""Managers over tiny models, and batches for them, shared by the tests of this folder.

They are made where ``models.place`` says. :func:`assert_same` has float32's tolerance, so it is for
the CPU; ``oracles.assert_close`` is for both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import towers
from hypothesis import strategies as st

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.graphs.cuda import CudaBackend
from vllm.vit_cudagraph.graphs.recorded import RecordedBackend, RecordedGraph
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing.models import place
from vllm.vit_cudagraph.testing.subject import new_pool, with_settings

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
CPU = torch.device("cpu")
ON_GPU = place().device == "cuda"
GRAPH: type = torch.cuda.CUDAGraph if ON_GPU else RecordedGraph
BACKEND: type = CudaBackend if ON_GPU else RecordedBackend
Grids = Sequence[Sequence[int]]


@cache
def config(family: str) -> VllmConfig:
    """vLLM's configuration of a tiny model with encoder graphs on."""
    return towers.make_config(family)


@cache
def model(family: str) -> Any:
    """A tiny model of the class that the plugin registered, with reference attention."""
    return towers.build_model(family, config=config(family))


class DearEager(EncoderGraphManager):
    """A manager by whose costs whatever fits a graph is replayed: most tests want to see that."""

    def _known_costs(self) -> CostLines:
        return CostLines.of(dict.fromkeys(self.captured, 1.0), {1: 1e6})


def make_manager(
    family: str,
    *,
    budgets: Sequence[int] = (),
    items: int = 0,
    frames: int | None = None,
    capture: bool = True,
    of: Any = None,
    base: VllmConfig | None = None,
    manager_class: type[EncoderGraphManager] = DearEager,
) -> EncoderGraphManager:
    """A captured manager with vLLM's three encoder settings, of the family's shared model."""
    settings = with_settings(
        base or config(family),
        encoder_cudagraph_token_budgets=list(budgets),
        encoder_cudagraph_max_vision_items_per_batch=items,
        encoder_cudagraph_max_frames_per_batch=frames,
    )
    served = of or model(family)
    with set_current_vllm_config(settings):
        dtype = getattr(torch, place().dtype)
        manager = manager_class(settings, place().torch_device, dtype, served)
        if capture:
            manager.capture(new_pool())
    return manager


def batch(served: Any, grids: Grids, modality: str = "image", seed: int = 0) -> dict[str, Any]:
    """One modality's kwargs as the runner hands them over."""
    pixels = towers.random_pixels(served, [list(grid) for grid in grids], seed)
    pixels = pixels.to(place().torch_device)
    key = "pixel_values" if modality == "image" else "pixel_values_videos"
    return {key: pixels, f"{modality}_grid_thw": torch.tensor([list(g) for g in grids])}


def run(manager: EncoderGraphManager, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """``execute`` as a runner calls it; fails the test where it says None."""
    with torch.inference_mode():
        outputs = manager.execute(mm_kwargs)
    assert outputs is not None, manager.statistics
    return outputs


def eager(served: Any, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What the model's own ``embed_multimodal`` (upstream's code) gives."""
    with torch.inference_mode():
        return list(served.embed_multimodal(**mm_kwargs))


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Item by item, within float32's rounding of a few layers.

    ``test_oracles.py`` shows for a tolerance like this one that one patch breaks it.
    """
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@contextmanager
def backend(served: Any, name: AttentionBackendEnum) -> Iterator[None]:
    """The tower as told another attention backend."""
    with mock.patch.object(served.visual, "attn_backend", name):
        yield


def grids_of(merge: int = 2, side: int = 12, frames: int = 1) -> st.SearchStrategy[list[int]]:
    """One grid: any shape up to ``side`` merged tokens, and strips up to 40 by 1."""
    square = st.tuples(st.integers(1, side), st.integers(1, side))
    strip = st.integers(1, 40).flatmap(lambda n: st.sampled_from([(1, n), (n, 1)]))
    return st.tuples(st.integers(1, frames), st.one_of(square, strip)).map(
        lambda grid: [grid[0], grid[1][0] * merge, grid[1][1] * merge]
    )
