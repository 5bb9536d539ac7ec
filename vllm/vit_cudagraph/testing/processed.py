# SPDX-License-Identifier: Apache-2.0
"""What a model's real processor makes of real photographs, as a runner hands it over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.vit_cudagraph.testing import photos
from vllm.vit_cudagraph.testing.models import place

SIZES = ((224, 224), (312, 208), (130, 410), (97, 61))
"""Widths and heights of the photographs, in pixels."""


def image_kwargs(config: VllmConfig, sizes: Sequence[tuple[int, int]] = SIZES) -> dict[str, Any]:
    """One modality's kwargs of photographs of these sizes, on the tests' device."""
    names = list(photos.PHOTOS)
    images = [photos.photo(names[n % len(names)], size) for n, size in enumerate(sizes)]
    return _kwargs(config, "image", images)


def video_kwargs(config: VllmConfig, frames: Sequence[int] = (4, 2)) -> dict[str, Any]:
    """One modality's kwargs of clips of so many frames, 112 pixels wide and 84 high."""
    clips = []
    for clip, count in enumerate(frames):
        name = list(photos.PHOTOS)[clip]
        pictures = [np.asarray(photos.photo(name, (112 + 8 * n, 84))) for n in range(count)]
        clips.append(np.stack([picture[:, :112] for picture in pictures]))
    return _kwargs(config, "video", clips)


def vision_chunk_kwargs(
    config: VllmConfig, sizes: Sequence[tuple[int, int]] = SIZES, frames: Sequence[int] = (4, 2)
) -> dict[str, Any]:
    """One modality's kwargs of photographs of these sizes and chunks of videos between them."""
    names = list(photos.PHOTOS)
    items: list[dict[str, Any]] = [
        {"type": "image", "image": photos.photo(names[n % len(names)], size), "uuid": None}
        for n, size in enumerate(sizes)
    ]
    for count in frames:
        pictures = [photos.photo(names[count], (112, 84)) for _ in range(count)]
        chunk = {"type": "video_chunk", "video_chunk": pictures, "uuid": None}
        items.insert(1, chunk | {"prompt": "", "video_idx": 0})
    return _kwargs(config, "vision_chunk", items)


def _kwargs(config: VllmConfig, modality: str, items: list[Any]) -> dict[str, Any]:
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    if modality == "video" and processor.info.get_data_parser().video_needs_metadata:
        items = [(clip, _metadata(len(clip))) for clip in items]
    # As many in one prompt as the model takes: a batch may hold those of several prompts.
    most = processor.info.supported_mm_limits.get(modality) or len(items)
    prompts = [items[first : first + most] for first in range(0, len(items), most)]
    entries = [
        (modality, item) for part in prompts for item in _of_prompt(processor, modality, part)
    ]
    ((_, _, kwargs),) = group_and_batch_mm_kwargs(entries, device=place().torch_device)
    return kwargs


def _of_prompt(processor: Any, modality: str, items: list[Any]) -> Any:
    text = processor.dummy_inputs.get_dummy_text({modality: len(items)})
    prompt = processor.info.get_tokenizer().encode(text)
    inputs = ProcessorInputs(prompt, processor.info.parse_mm_data({modality: items}))
    return processor.apply(inputs, TimingContext(enabled=False))["mm_kwargs"][modality]


def _metadata(frames: int) -> dict[str, Any]:
    return {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
