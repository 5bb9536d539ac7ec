# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision-2: positions come as data, a video is a grid for each frame."""

from typing import Any

import pytest
import torch
from families import FamilyConformance

from vllm.vit_cudagraph import tower
from vllm.vit_cudagraph.geometry import NotCapturable
from vllm.vit_cudagraph.testing.strategies import Batch


class TestLlavaOnevision2(FamilyConformance):
    family = "llava_onevision2"

    def test_an_mlp_with_its_activation_under_another_name_is_left_alone(self) -> None:
        mlp = self.subject().model.visual.encoder.layers[0].mlp
        assert hasattr(mlp, "fc1") and not hasattr(mlp, "act")
        assert list(tower._mlps(mlp)) == []

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_positions_survive_in_pixel_rows(self, dtype: torch.dtype) -> None:
        model = self.subject().model
        kwargs = self.subject().kwargs(Batch("image", [(1, 2, 4)], 0))
        numbers = [0, 1, 255, 256, 257, 2049, 65535, 65536, 100_001] + [7] * 15
        kwargs["pixel_values"] = pixels = kwargs["pixel_values"].to(dtype)
        kwargs["patch_positions"] = torch.tensor(numbers, device=pixels.device).view(8, 3)
        rows = model.vit_inputs(kwargs).pixels
        assert rows.dtype == dtype and rows.shape[1:] == model.vit_declared.pixel_row
        low, middle, high = rows[:, -9:].float().split(3, dim=1)
        assert torch.equal((low + 256 * middle + 65536 * high).long(), kwargs["patch_positions"])

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"video_grid_thw": torch.tensor([[2, 2, 4]])}, "attend to each other"),
            ({"video_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 2]])}, "differ in size"),
            ({"video_num_frames": torch.tensor([1])}, "2 grids for 1 frames"),
            ({"patch_positions_videos": None}, "no patch_positions_videos"),
        ],
        ids=["codec", "frames of two sizes", "frames too few", "no positions"],
    )
    def test_what_is_left_to_upstream(self, change: dict[str, Any], says: str) -> None:
        """Nothing of such a batch runs here; upstream meets it as it would without us."""
        kwargs = self.subject().kwargs(Batch("video", [(2, 2, 4)], 0)) | change
        with pytest.raises(NotCapturable, match=says):
            self.subject().model.vit_inputs(kwargs)
        assert self.manager().execute(kwargs) is None
