# SPDX-License-Identifier: Apache-2.0
"""The mixin under vLLM's own manager: the protocol's methods do not rely on ours."""

from typing import Any

import managers
import pytest
import stock
import torch
from hypothesis import given

from vllm.vit_cudagraph.geometry import MALFORMED, NotCapturable
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.testing import strategies
from vllm.vit_cudagraph.testing.profiles import examples
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings

SETTINGS = {
    "one frame limit": GraphSettings((16, 40, 130), 8, 3),
    "no frame limit": GraphSettings((16, 130), 4, None),
    "one item": GraphSettings((40,), 1, None),
}


def upstreams(family: str, settings: GraphSettings) -> stock.EncoderCudaGraphManager:
    """vLLM's manager, captured, over this package's model."""
    return stock.make_manager(managers.model(family), managers.config(family), settings)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", managers.FAMILIES)
def test_upstreams_manager_is_right_over_the_mixin(family: str, name: str) -> None:
    """Images and clips, among them clips with more frames than upstream's manager counts."""
    manager = upstreams(family, SETTINGS[name])
    geometry = managers.model(family).vit_declared

    @examples(12)
    @given(strategies.batches(geometry, most_tokens=140))
    def holds(batch: Batch) -> None:
        stock.check(manager, batch)

    holds()


def test_modality() -> None:
    served = managers.model("qwen2_5_vl")
    for modality in ("image", "video"):
        kwargs = managers.batch(served, [[1, 4, 4]], modality)
        assert served.get_input_modality(kwargs) == modality


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image_grid_thw": None}, "no grids among"),
        ({"pixel_values": ["a picture"]}, "pixel_values is not one tensor"),
    ],
    ids=["no grids", "a list of pixels"],
)
def test_input_that_no_step_is_made_of(change: dict[str, Any], says: str) -> None:
    served = managers.model("qwen2_5_vl")
    kwargs = managers.batch(served, [[1, 4, 4]]) | change
    with pytest.raises(NotCapturable, match=says) as refused:
        served.prepare_encoder_cudagraph_replay_buffers(kwargs, 1, 1)
    assert refused.value.reason == MALFORMED


def test_pixels_in_one_tensor_an_item() -> None:
    """In a list, or stacked where all have one size; repacked they keep that form."""
    served = managers.model("qwen2_5_vl")
    kwargs = managers.batch(served, [[1, 4, 4], [1, 4, 4]])
    whole = kwargs["pixel_values"]
    for each in (list(whole.split(16)), whole.unflatten(0, (2, 16))):
        given = kwargs | {"pixel_values": each}
        assert torch.equal(served.vit_checked_inputs(given).pixels, whole)
        last = served.vit_repack(given, [1])
        assert type(last["pixel_values"]) is type(each)
        assert torch.equal(served.vit_checked_inputs(last).pixels, whole[16:])


def test_a_model_without_geometry_is_named() -> None:
    class Undeclared(WindowedViTCudaGraphMixin):
        pass

    with pytest.raises(NotImplementedError, match=r"Undeclared must define vit_geometry\(\)"):
        _ = Undeclared().vit_declared
