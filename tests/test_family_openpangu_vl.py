# SPDX-License-Identifier: Apache-2.0
"""OpenPangu-VL: windows, images that the model normalises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from families import FamilyConformance
from test_lengths import TakesLongest

from vllm.model_executor.models import openpangu_vl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.testing.strategies import Batch
from vllm.vit_cudagraph.testing.subject import Subject


@contextmanager
def buildable() -> Iterator[None]:
    """The class refuses to be built where vLLM names another backend, as it does on a CPU."""
    flash: Any = AttentionBackendEnum.FLASH_ATTN
    with mock.patch.object(openpangu_vl, "get_vit_attn_backend", return_value=flash):
        yield


class TestOpenPanguVL(TakesLongest, FamilyConformance):
    family = "openpangu_vl"

    @classmethod
    def make_model(cls) -> Subject:
        with buildable():
            return super().make_model()

    def upstream_model(self) -> Any:
        with buildable():
            return super().upstream_model()

    def test_images_are_normalised_as_the_model_does(self) -> None:
        """Rows of one frame become rows of two equal ones; repacked images are raw as before."""
        subject = self.subject()
        mm_kwargs = subject.kwargs(Batch("image", ((1, 4, 4), (1, 2, 6)), 3))
        raw, model = mm_kwargs["pixel_values"], subject.model
        rows = model.vit_inputs(mm_kwargs).pixels.unflatten(1, (3, 2, -1))
        assert torch.equal(rows[:, :, 0], rows[:, :, 1])
        mean, std = (raw.new_tensor(v)[:, None] for v in (model.image_mean, model.image_std))
        expected = (raw.unflatten(1, (3, -1)).float() / 255 - mean) / std
        torch.testing.assert_close(rows[:, :, 0].float(), expected, atol=2e-2, rtol=1e-2)
        assert torch.equal(model.vit_repack(mm_kwargs, [1])["pixel_values"], raw[16:])
