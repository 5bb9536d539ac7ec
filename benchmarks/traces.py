# SPDX-License-Identifier: Apache-2.0
"""Batches of images and videos to run a vision tower on, as grids of patches.

Sizes go through the image processor's own ``smart_resize``. A trace of one's own is a file with a
batch a line, ``t,h,w`` for each item, in patches::

    1,16,16 1,46,30
    1,92,92

or ``video:`` at the start of each line for videos.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_TOKENS = 4096
"""Merged tokens of an image, at most; the processor shrinks larger ones."""

SIZES = [
    (224, 224),
    (336, 336),
    (448, 336),
    (512, 512),
    (640, 427),
    (640, 480),
    (700, 500),
    (800, 600),
    (896, 896),
    (1024, 768),
    (1280, 720),
    (1000, 2530),
]
"""Width and height of the pictures of the synthetic trace."""

Grids = list[list[int]]


@dataclass(frozen=True)
class Trace:
    """Attributes:
    modality: Of all batches.
    batches: Grids of each, in patches.
    """

    modality: str
    batches: list[Grids]


def grid_of(width: int, height: int, cell: int, frames: int = 1) -> list[int]:
    """The grid that the processor makes of a picture.

    Args:
        width, height: In pixels.
        cell: Pixels along a side of a merged token (two patches).
        frames: Of the grid, after the temporal merge.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    high, wide = smart_resize(
        height, width, factor=cell, min_pixels=4 * cell**2, max_pixels=MOST_TOKENS * cell**2
    )
    return [frames, high // cell * 2, wide // cell * 2]


def synthetic(cell: int, batches: int, seed: int) -> Trace:
    """One to six pictures of mixed sizes."""
    draw = random.Random(seed)
    return Trace(
        "image",
        [
            [grid_of(*draw.choice(SIZES), cell) for _ in range(draw.randint(1, 6))]
            for _ in range(batches)
        ],
    )


def single(cell: int, batches: int, seed: int) -> Trace:
    """One picture, from 64 to 4,096 tokens in even ratios, squares and 3:2 in turn."""
    low, high = 64, MOST_TOKENS
    traced = []
    for index in range(batches):
        tokens = low * (high / low) ** (index / max(1, batches - 1))
        ratio = 1.0 if index % 2 == 0 else 1.5
        width = round((tokens * ratio) ** 0.5) * cell
        traced.append([grid_of(width, round(width / ratio), cell)])
    return Trace("image", traced)


def twenty(cell: int, batches: int, seed: int) -> Trace:
    """Twenty pictures a batch, one of the smaller sizes for all, or mixed."""
    draw, small = random.Random(seed), SIZES[:6]
    traced = []
    for index in range(batches):
        one = draw.choice(small)
        sizes = [one if index % 2 == 0 else draw.choice(small) for _ in range(20)]
        traced.append([grid_of(*size, cell) for size in sizes])
    return Trace("image", traced)


def video(cell: int, batches: int, seed: int) -> Trace:
    """One or two videos of 2 to 16 frames of the grid."""
    draw = random.Random(seed)
    sizes = [(224, 224), (320, 240), (448, 336), (640, 360)]
    return Trace(
        "video",
        [
            [
                grid_of(*draw.choice(sizes), cell, frames=draw.choice([2, 4, 8, 16]))
                for _ in range(draw.randint(1, 2))
            ]
            for _ in range(batches)
        ],
    )


TRACES: dict[str, Callable[[int, int, int], Trace]] = {
    "synthetic": synthetic,
    "single": single,
    "twenty": twenty,
    "video": video,
}
"""By name; each takes the cell's pixels, the number of batches and a seed."""


def read_trace(path: Path) -> Trace:
    """A trace from a file.

    Raises:
        SystemExit: A line that is not in the form above, with its number.
    """
    modalities, batches = set(), []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        modality, _, items = line.rpartition(":")
        try:
            batches.append([_grid(item) for item in items.split()])
        except ValueError as error:
            raise SystemExit(f"{path}:{number}: {error}; write t,h,w for each item") from None
        modalities.add(modality.strip() or "image")
    if len(modalities) != 1 or not modalities <= {"image", "video"}:
        raise SystemExit(f"{path}: all lines are to be of images, or all of videos (video: ...)")
    return Trace(modalities.pop(), batches)


def _grid(item: str) -> list[int]:
    numbers = [int(number) for number in item.split(",")]
    if len(numbers) != 3 or min(numbers) < 1 or numbers[1] % 2 or numbers[2] % 2:
        raise ValueError(f"{item!r} is not three numbers, h and w even")
    return numbers
