# SPDX-License-Identifier: Apache-2.0
"""The oracle beside vLLM: transformers' vision towers, with weights and photographs in common.

One tiny checkpoint is read twice, by vLLM's own loader and by transformers' own, so that no mapping
of weights of ours stands between the two towers. Photographs too go two ways: through vLLM's
multimodal processor, which gives what a model runner hands over (uint8 pixels, normalised on the
device), and through transformers' processor, which gives normalised float pixels.

Shape letters: ``N`` patches, ``T`` merged tokens, ``C`` width of the tower.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import managers
import torch
import towers
from transformers import AutoModelForImageTextToText, AutoProcessor

from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.photos import video_metadata

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True)
class Twins:
    """One checkpoint in both projects.

    Attributes:
        model: vLLM's model, of the class that the plugin registered, with reference attention.
        config: vLLM's configuration of it, encoder graphs on.
        tower: transformers' vision tower.
        processor: transformers' processor of the checkpoint.
    """

    model: Any
    config: VllmConfig
    tower: Any
    processor: Any

    def runner_kwargs(self, modality: str, data: Sequence[Any]) -> dict[str, Any]:
        """Some photographs or videos as vLLM's processor gives them to its model runners.

        Args:
            modality: ``image`` (PIL images) or ``video`` (uint8 frames [t, height, width, 3]).
        """
        media = list(data)
        if modality == "video":
            media = [(frames, video_metadata(len(frames))) for frames in data]
        processor = MULTIMODAL_REGISTRY.create_processor(self.config.model_config)
        placeholder = f"<|vision_start|><|{modality}_pad|><|vision_end|>"
        prompt = self.processor.tokenizer(placeholder * len(data))["input_ids"]
        inputs = ProcessorInputs(prompt, processor.info.parse_mm_data({modality: media}))
        processed = processor.apply(inputs, TimingContext(enabled=False))
        items = [(modality, item) for item in processed["mm_kwargs"][modality]]
        ((_, number, kwargs),) = group_and_batch_mm_kwargs(items, device=managers.CPU)
        assert number == len(data)
        return kwargs

    def oracle(self, modality: str, data: Sequence[Any]) -> list[torch.Tensor]:
        """The same through transformers: one [T, width] an item, deepstack levels side by side."""
        if modality == "image":
            inputs = self.processor.image_processor(images=list(data), return_tensors="pt")
        else:
            frames = [torch.from_numpy(video).permute(0, 3, 1, 2) for video in data]
            inputs = self.processor.video_processor(
                videos=frames, do_sample_frames=False, return_tensors="pt"
            )
        pixels, grids = inputs[PIXELS[modality]], inputs[f"{modality}_grid_thw"]
        assert pixels.is_floating_point()
        with torch.inference_mode():
            outputs = self.tower(pixels, grid_thw=grids)
        levels = getattr(outputs, "deepstack_features", None) or []
        rows = torch.cat([outputs.pooler_output, *levels], dim=1)
        tokens = grids.prod(dim=1) // self.tower.spatial_merge_size**2
        return list(rows.split(tokens.tolist()))


@cache
def twins(family: str) -> Twins:
    """The tiny checkpoint of ``family``, loaded by both projects; made once a process."""
    config = towers.make_config(family)
    folder = str(towers.checkpoint(family))
    whole = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return Twins(
        model=models.build_model(config, fill=models.load_weights(config)),
        config=config,
        tower=whole.model.visual.eval(),
        processor=AutoProcessor.from_pretrained(folder),
    )


@contextmanager
def block_outputs(tower: Any) -> Iterator[list[torch.Tensor]]:
    """A list that gets a copy of the hidden states [N, C] after each block of either tower.

    Forwards are wrapped because a hook on a module would not be called: vLLM's blocks go past
    ``Module.__call__`` where they are not compiled.
    """
    states: list[torch.Tensor] = []

    def recorded(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = forward(*args, **kwargs)
            states.append(output.detach().reshape(-1, output.shape[-1]).clone())
            return output

        return call

    with ExitStack() as stack:
        for block in tower.blocks:
            stack.enter_context(mock.patch.object(block, "forward", recorded(block.forward)))
        yield states
