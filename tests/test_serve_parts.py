# SPDX-License-Identifier: Apache-2.0
"""The parts that serving tests and the demonstration stand on, without a server."""

from __future__ import annotations

import base64
import io
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from vllm.vit_cudagraph.testing import checkpoints, photos
from vllm.vit_cudagraph.testing.serving import Answer, Server, Statistics


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_checkpoint_loads_in_transformers_and_holds_the_same_weights(
    family: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    first = checkpoints.make_checkpoint(family, tmp_path / "first")
    again = checkpoints.make_checkpoint(family, tmp_path / "again")
    other = checkpoints.make_checkpoint(family, tmp_path / "other", seed=1)
    weights, same, different = (
        load_file(folder / "model.safetensors") for folder in (first, again, other)
    )
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not any(torch.equal(weights[name], different[name]) for name in weights)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())

    _, loading = AutoModelForImageTextToText.from_pretrained(first, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    processor = AutoProcessor.from_pretrained(first)
    image = photos.photo("retina")
    grid = processor.image_processor([image], return_tensors="pt")["image_grid_thw"]
    merged = int(grid.prod()) // checkpoints.MERGE_SIZE**2
    assert 500 < merged <= checkpoints.MAX_IMAGE_TOKENS


def test_experts_are_stored_as_published_checkpoints_store_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    path = checkpoints.make_checkpoint("qwen3_vl_moe", tmp_path)
    name = "language_model.layers.0.mlp.experts.down_proj"
    stored = load_file(path / "model.safetensors")[f"model.{name}"]
    assert stored.shape == (4, 32, checkpoints.TEXT_HIDDEN)  # (expert, in, out)
    loaded = AutoModelForImageTextToText.from_pretrained(path).model.get_parameter(name)
    assert torch.equal(loaded, stored.transpose(1, 2))


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set it to one of qwen2_vl, qwen2_5_vl") as refusal:
        checkpoints.make_checkpoint("qwen9_vl", tmp_path)
    assert "a module of that name to vllm/vit_cudagraph/testing/families" in str(refusal.value)


def test_command_line_writes_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.main(["qwen2_vl", str(tmp_path / "tiny")])
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}\n"
    same = checkpoints.make_checkpoint("qwen2_vl", tmp_path / "same")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "tiny" / name).read_bytes() == (same / name).read_bytes()

    with pytest.raises(SystemExit, match="2"):
        checkpoints.main(["qwen9_vl", str(tmp_path)])
    assert "choose from" in capsys.readouterr().err


class Runner:
    """What the twin's worker uses of vLLM's model runner."""

    def __init__(self, model: Any, manager: mock.Mock | None) -> None:
        self.get_model = lambda: model
        self.encoder_cudagraph_manager: mock.Mock | None = None
        self._manager = manager

    def _maybe_init_encoder_cudagraph_manager(self) -> None:
        self.encoder_cudagraph_manager = self._manager


def test_twin_captures_only_models_on_the_mixin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
    from vllm.vit_cudagraph.testing import cpu_worker

    warnings: list[str] = []
    monkeypatch.setattr(cpu_worker.logger, "warning", warnings.append)
    served = mock.Mock(spec=WindowedViTCudaGraphMixin)

    manager = mock.Mock()
    runner = Runner(served, manager)
    cpu_worker.capture_encoder_graphs(runner)
    manager.capture.assert_called_once()
    assert runner.encoder_cudagraph_manager is manager

    cpu_worker.capture_encoder_graphs(Runner(torch.nn.Module(), None))  # without the flag
    assert warnings == []

    manager = mock.Mock()
    runner = Runner(torch.nn.Module(), manager)
    cpu_worker.capture_encoder_graphs(runner)
    manager.capture.assert_not_called()
    assert runner.encoder_cudagraph_manager is None, "the runner goes eagerly without one"
    assert warnings == [cpu_worker.NOT_SERVED]


def test_chat_template_keeps_the_order_of_the_parts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoints.make_checkpoint("qwen2_vl", tmp_path))
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    assert text == f"<|im_start|>user\na{image}{video}<|im_end|>\n<|im_start|>assistant\n"
    for token in checkpoints.SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1


@pytest.mark.parametrize("name", photos.PHOTOS)
@pytest.mark.parametrize("size", [(56, 56), (1500, 40), (30, 900)])
def test_photograph_has_the_asked_shape_and_a_picture_in_it(
    name: str, size: tuple[int, int]
) -> None:
    image = photos.photo(name, size)
    assert (image.size, image.mode) == (size, "RGB")
    assert np.asarray(image).std() > 1.0


def test_unknown_photograph_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of astronaut"):
        photos.photo("no such photo")


def test_missing_scikit_image_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)  # Python's own way to make an import fail
    with pytest.raises(ImportError, match=r"pip install '\.\[test\]'"):
        photos.photo("rocket")


def test_image_url_holds_the_pixels() -> None:
    image = photos.photo("coffee", (60, 40))
    head, _, body = photos.image_url(image).partition(",")
    assert head == "data:image/png;base64"
    decoded = Image.open(io.BytesIO(base64.b64decode(body)))
    assert np.array_equal(np.asarray(decoded), np.asarray(image))


def test_video_url_is_a_film_of_the_frames(tmp_path: Path) -> None:
    import cv2

    frames = photos.panning_frames("rocket", num_frames=6, size=(96, 64))
    assert (frames.shape, frames.dtype) == ((6, 64, 96, 3), np.uint8)
    assert not np.array_equal(frames[0], frames[-1])
    head, _, body = photos.video_url(frames, fps=3.0).partition(",")
    assert head == "data:video/mp4;base64"
    path = tmp_path / "video.mp4"
    path.write_bytes(base64.b64decode(body))
    film = cv2.VideoCapture(str(path))
    assert (film.get(cv2.CAP_PROP_FRAME_COUNT), film.get(cv2.CAP_PROP_FPS)) == (6, 3.0)
    for frame in frames:
        is_read, decoded = film.read()
        assert is_read
        # Lossy, but the right frame in the right order of colours.
        assert np.abs(decoded[:, :, ::-1].astype(int) - frame).mean() < 12


def test_distance_of_answers() -> None:
    answer = Answer("a", (1, 2), (-0.5, -1.0), 10)
    assert answer.distance(answer) == 0.0
    assert answer.distance(Answer("a", (1, 2), (-0.5, -1.25), 10)) == 0.25
    assert answer.distance(Answer("b", (1, 3), (-0.5, -1.0), 10)) == math.inf
    assert answer.distance(Answer("a", (1, 2), (-0.5, math.nan), 10)) == math.inf


def test_statistics_are_those_of_the_last_line_that_the_manager_prints(tmp_path: Path) -> None:
    from vllm.vit_cudagraph import statistics

    counts = statistics.Statistics()
    counts.count_replay(64, items=2, tokens=50)
    log = tmp_path / "server.log"
    log.write_text(f"INFO {counts}\n")
    server = Server("unused", log_path=log)
    before = server.statistics()
    assert before == Statistics(replayed=2, replays=1, padding=14)

    counts.count_replay(64, items=1, tokens=64)
    counts.count_eager("larger than every token budget", 2)
    counts.count_eager("a reason (with more)", 1)
    log.write_text(f"INFO {before}\nINFO {counts}\nsomething else\n")
    reasons = "larger than every token budget: 2; a reason (with more): 1"
    after = server.statistics()
    assert after == Statistics(3, 3, reasons, replays=2, padding=14)
    assert after.since(before) == Statistics(1, 3, reasons, replays=1, padding=0)
