# SPDX-License-Identifier: Apache-2.0
"""Offline inference with encoder graphs: `LLM.generate` with images and a video.

    .venv/bin/python docs/examples/offline.py       # a tiny random model, after `make env`
    python docs/examples/offline.py --model Qwen/Qwen2.5-VL-7B-Instruct    # on a GPU

On a GPU vLLM's flag `cudagraph_mm_encoder` is all that is needed. On a CPU the worker class brings
in the twin, which keeps the rules of CUDA graphs but is no faster than eager. A last warning that
the engine core exited unexpectedly is vLLM's own: the process ends, and its engine with it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from vllm.vit_cudagraph.testing.photos import panning_frames, photo, video_metadata


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Qwen2-VL, Qwen2.5-VL or Qwen3-VL; default: a tiny one")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=32, help="length of each answer")
    return parser.parse_args()


def engine_settings() -> dict[str, Any]:
    """What to pass to `LLM`: the flag, and on a CPU the worker that runs the twin."""
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {"compilation_config": {"cudagraph_mm_encoder": True}}
    if current_platform.is_cpu():
        settings["worker_cls"] = "vllm.vit_cudagraph.testing.cpu_worker.TwinWorker"
        # Starts faster. On a GPU this setting would switch encoder graphs off.
        settings["enforce_eager"] = True
        # GiB for the KV cache; by default vLLM wants nearly all of the machine's memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return settings


def make_prompts(tokenizer: Any) -> list[dict[str, Any]]:
    """One image, two images and a video, each with a question, as `LLM.generate` takes them."""
    frames = panning_frames("rocket", num_frames=8, size=(224, 168))
    # Sampled frames and where they lie in the clip; Qwen3-VL writes their times into the prompt.
    metadata = video_metadata(len(frames))
    images = [photo("chelsea"), photo("coffee", (280, 420))]
    return [
        prompt(tokenizer, "What is in the picture?", image=[photo("astronaut")]),
        prompt(tokenizer, "What do the two pictures have in common?", image=images),
        prompt(tokenizer, "What happens in the video?", video=[(frames, metadata)]),
    ]


def prompt(tokenizer: Any, question: str, **media: list[Any]) -> dict[str, Any]:
    """A prompt of vLLM's: the chat template filled in, and the media that its placeholders mean."""
    parts = [{"type": modality} for modality, items in media.items() for _ in items]
    content = [*parts, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return {"prompt": text, "multi_modal_data": media}


def run(model: str, max_model_len: int, max_tokens: int, dtype: str = "auto") -> None:
    """Generate and print. `dtype` is vLLM's setting."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        limit_mm_per_prompt={"image": 2, "video": 1},
        **engine_settings(),
    )
    prompts = make_prompts(llm.get_tokenizer())
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for output in llm.generate(prompts, sampling):
        media = output.prompt.count("image_pad"), output.prompt.count("video_pad")
        print(f"{media[0]} images, {media[1]} videos: {output.outputs[0].text!r}")
    print(
        "The lines 'Encoder CUDA graphs: ... items replayed' above count what ran as a graph, what "
        "ran eagerly, and why. A server prints one every VIT_CUDAGRAPH_LOG_INTERVAL items."
    )


def main() -> None:
    """Run the example with the given model, or with a tiny one that lives as long as the run."""
    options = arguments()
    os.environ.setdefault("VIT_CUDAGRAPH_LOG_INTERVAL", "1")
    if options.model:
        run(options.model, options.max_model_len, options.max_tokens)
        return
    from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint

    with tempfile.TemporaryDirectory(prefix="vit-cudagraph-offline-") as folder:
        checkpoint = make_checkpoint("qwen2_5_vl", folder)
        # The dtype of its weights: vLLM warns when it casts them.
        run(str(checkpoint), options.max_model_len, options.max_tokens, dtype="float32")


if __name__ == "__main__":  # vLLM starts its engine in a new process, which imports this file
    main()
