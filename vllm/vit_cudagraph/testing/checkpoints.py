# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights that the real vLLM serves.

A checkpoint is everything a folder from a model hub holds: a configuration, safetensors weights, a
byte-level BPE tokenizer with the vision special tokens, a chat template, and the stock image and
video processors. Only the sizes are small, so the towers do what the large ones do (windows and
full attention, deepstack, learned positions) in a few milliseconds on a CPU.

    python -m vllm.vit_cudagraph.testing.checkpoints qwen2_5_vl /tmp/tiny
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")

#: Most merged tokens that an image, and a pair of video frames, is resized to.
MAX_IMAGE_TOKENS = 640
MAX_FRAME_TOKENS = 64

MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2

VISION_HIDDEN = 64
VISION_HEADS = 4
VISION_DEPTH = 4
TEXT_HIDDEN = 64
TEXT_HEAD_DIM = 32  # the smallest that vLLM's CPU attention has a kernel for
VOCAB_SIZE = 384

SHALLOW: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2},
    "qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"depth": 2, "deepstack_visual_indexes": [0]},
}

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TOKENS = SPECIAL_TOKENS[:3]
"""Those of the chat template alone, for families with image tokens of their own."""

_SENTENCE = (
    "A photograph shows a person, a cat, a cup of coffee or a rocket; the answer names what is "
    "seen in the picture, from left to right and from the first frame of the video to the last."
)

IMAGE_PART = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PART = "<|vision_start|><|video_pad|><|vision_end|>"

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{ part['text'] }}
{%- elif part['type'] == 'image' or part['type'] == 'image_url' -%}
IMAGE_PART
{%- elif part['type'] == 'video' or part['type'] == 'video_url' -%}
VIDEO_PART
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_checkpoint(family: str, path: str | Path, *, seed: int = 0, shallow: bool = False) -> Path:
    """Write a tiny float32 checkpoint of `family` into the folder `path` and return that folder.

    The same family and seed always give the same weights. With `shallow` the tower has two layers,
    one of each kind, for tests that run it many thousand times. Raises ValueError for a family that
    is neither in `FAMILIES` nor in `families()`. Takes about a second, transformers apart.
    """
    if family not in FAMILIES + families():
        raise ValueError(
            f"family={family!r} is unknown; set it to one of {', '.join(FAMILIES + families())} "
            "(or add a module of that name to vllm/vit_cudagraph/testing/families)"
        )
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if family not in FAMILIES:
        module = importlib.import_module(f"vllm.vit_cudagraph.testing.families.{family}")
        module.make(path, seed)
        return path
    tokenizer = make_tokenizer()
    model = _model(family, tokenizer, SHALLOW[family] if shallow else {})
    fill_weights(model, tokenizer, seed)
    with no_progress_bar():
        model.save_pretrained(path)
    if family == "qwen3_vl_moe":
        _transpose_experts(path / "model.safetensors")
    make_processor(family, tokenizer).save_pretrained(path)
    return path


def families() -> tuple[str, ...]:
    """Names of the further families: one module each in ``testing/families``."""
    folder = Path(__file__).parent / "families"
    return tuple(sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if m.name[0] != "_"))


def _transpose_experts(path: Path) -> None:
    """Give the stacked experts the published layout, (expert, in, out), which vLLM expects.

    transformers reads both layouts and writes its own, (expert, out, in).
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    for name in weights:
        if ".experts." in name:
            weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """A bar for a file that takes a hundredth of a second only clutters the caller's output."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def patch_size(family: str) -> int:
    """Side of a vision patch of `family`, in pixels."""
    return 16 if family.startswith("qwen3") else 14


def make_tokenizer(special_tokens: Sequence[str] = SPECIAL_TOKENS, **named: str) -> Any:
    """A byte-level BPE tokenizer.

    Args:
        special_tokens: `<|endoftext|>` and `<|im_end|>` among them.
        named: Further special tokens, which the tokenizer has as attributes of these names.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys([*special_tokens, *named.values()]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_SENTENCE], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:],
        model_max_length=32768,
        **({"extra_special_tokens": named} if named else {}),
    )


def chat_template(image: str = IMAGE_PART, video: str = VIDEO_PART) -> str:
    """The chat template, with what stands for an image and for a video in a message."""
    return _CHAT_TEMPLATE.replace("IMAGE_PART", image).replace("VIDEO_PART", video)


def _vision_config(family: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "depth": VISION_DEPTH,
        "num_heads": VISION_HEADS,
        "patch_size": patch_size(family),
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    }
    if family == "qwen2_vl":
        return config | {"embed_dim": VISION_HIDDEN, "hidden_size": TEXT_HIDDEN, "mlp_ratio": 2}
    config |= {
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "out_hidden_size": TEXT_HIDDEN,
    }
    if family == "qwen2_5_vl":
        # Full attention in the second and last block, windows of 4 x 4 merged tokens in the others.
        return config | {"window_size": 112, "fullatt_block_indexes": [1, 3]}
    return config | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1, 2]}


def _text_config(family: str, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": TEXT_HIDDEN,
        "intermediate_size": 2 * TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000000.0}
    if not family.startswith("qwen3"):
        return config | {"rope_parameters": rope | {"mrope_section": [4, 6, 6]}}
    # Deepstack adds the tower's levels to the first text layers, one level a layer.
    config |= {"num_hidden_layers": 3, "head_dim": TEXT_HEAD_DIM}
    config["rope_parameters"] = rope | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    if family == "qwen3_vl_moe":
        # Narrower than the hidden size: a square matrix would hide a wrong layout when loaded.
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config["norm_topk_prob"] = True  # vLLM reads it; transformers knows no default for it
    return config


def _model(family: str, tokenizer: Any, vision: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text_config = _text_config(family, len(tokenizer))
    text_config |= {
        "bos_token_id": token_id["<|endoftext|>"],
        "eos_token_id": token_id["<|im_end|>"],
        "pad_token_id": token_id["<|endoftext|>"],
    }
    config = AutoConfig.for_model(
        family,
        vision_config=_vision_config(family) | vision,
        text_config=text_config,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


@torch.no_grad()
def fill_weights(model: Any, tokenizer: Any, seed: int) -> None:
    """Overwrite every parameter with seeded random numbers.

    A matrix gets the standard deviation 1/sqrt(fan_in), so activations keep their size through
    the layers, and the unit-norm text embeddings do not drown what the tower says.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            is_scale = name.endswith("weight")
            weight.copy_(1.0 + 0.1 * noise if is_scale else 0.1 * noise)
        elif any(table in name for table in ("embed_tokens", "pos_embed", "position_embedding")):
            weight.copy_(noise)
        else:
            # Experts are stacked, (experts, rows, columns); patch embeddings are convolutions.
            fan_in = weight.shape[-1] if weight.dim() == 3 else weight[0].numel()
            weight.copy_(noise / math.sqrt(fan_in))
    head = model.get_output_embeddings().weight
    # Wider logits make answers differ between pictures; special tokens are never the greedy
    # choice, so an answer always has the length that was asked for.
    head.mul_(4.0)
    head[tokenizer.all_special_ids] = 0.0


def make_processor(family: str, tokenizer: Any) -> Any:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    is_qwen3 = family.startswith("qwen3")
    patch = {
        "patch_size": patch_size(family),
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    }
    token_pixels = (patch_size(family) * MERGE_SIZE) ** 2
    image_pixels = {"shortest_edge": token_pixels, "longest_edge": MAX_IMAGE_TOKENS * token_pixels}
    # Qwen3-VL limits the pixels of all frames together, the older two those of one frame.
    frame_pixels = MAX_FRAME_TOKENS * token_pixels * (16 if is_qwen3 else 1)
    video_pixels = {"shortest_edge": token_pixels, "longest_edge": frame_pixels}
    if is_qwen3:
        image_processor = Qwen2VLImageProcessor(
            size=image_pixels, image_mean=[0.5] * 3, image_std=[0.5] * 3, **patch
        )
        video_processor = Qwen3VLVideoProcessor(size=video_pixels, **patch)
        processor_class = Qwen3VLProcessor
    else:
        image_processor = Qwen2VLImageProcessor(size=image_pixels, **patch)
        video_processor = Qwen2VLVideoProcessor(size=video_pixels, **patch)
        processor_class = Qwen2VLProcessor if family == "qwen2_vl" else Qwen2_5_VLProcessor
    return processor_class(image_processor, tokenizer, video_processor, chat_template())


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write a checkpoint of a family into a folder and name that folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", choices=FAMILIES + families())
    parser.add_argument("folder", type=Path, help="made if it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(arguments)
    print(make_checkpoint(options.family, options.folder, seed=options.seed))


if __name__ == "__main__":
    main()
