# SPDX-License-Identifier: Apache-2.0
"""Real photographs, and a short video made from one, without a download.

The photographs are files inside the scikit-image wheel (extra `test`). Shapes are pixels,
(width, height) where PIL's convention rules and (height, width) in arrays.
"""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

#: name -> file in scikit-image's data folder. Sizes: astronaut 512x512, camera 512x512 (grey),
#: chelsea 451x300 (a cat), coffee 600x400, hubble 1000x872, motorcycle 741x500, retina 1411x1411,
#: rocket 640x427.
PHOTOS = {
    "astronaut": "astronaut.png",
    "camera": "camera.png",
    "chelsea": "chelsea.png",
    "coffee": "coffee.png",
    "hubble": "hubble_deep_field.jpg",
    "motorcycle": "motorcycle_left.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
}


def photo(name: str, size: tuple[int, int] | None = None) -> Image.Image:
    """The photograph `name` in RGB, cropped at its centre to `size` = (width, height) if given.

    Where the photograph is smaller than `size` it is enlarged first, so any size is possible, a
    strip included. Raises ValueError for an unknown name, ImportError without scikit-image.
    """
    if name not in PHOTOS:
        raise ValueError(f"photo name={name!r} is unknown; use one of {', '.join(PHOTOS)}")
    image = Image.open(_data_dir() / PHOTOS[name]).convert("RGB")
    return image if size is None else _cover(image, size)


def _data_dir() -> Path:
    try:
        from skimage import data
    except ImportError as error:
        raise ImportError(
            "the photographs ship with scikit-image, which is not installed; "
            "install the extra that brings it: pip install '.[test]' in a checkout"
        ) from error
    return Path(data.data_dir)


def _cover(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Centre crop of `image` to `size`, enlarged beforehand where it would not fill it."""
    width, height = size
    scale = max(width / image.width, height / image.height, 1.0)
    if scale > 1.0:
        enlarged = (round(image.width * scale), round(image.height * scale))
        image = image.resize(enlarged, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def image_url(image: Image.Image, image_format: str = "PNG") -> str:
    """`image` as a data URL; "PNG" keeps every pixel, "JPEG" is what most clients send."""
    buffer = io.BytesIO()
    image.save(buffer, format=image_format)
    return data_url(f"image/{image_format.lower()}", buffer.getvalue())


def data_url(media_type: str, content: bytes) -> str:
    """`content` as a base64 data URL of `media_type`, such as image/png."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def panning_frames(
    name: str, num_frames: int = 8, size: tuple[int, int] = (224, 168)
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Frames of a camera that pans over the photograph `name` from its left edge to its right.

    Returns uint8 RGB of shape (num_frames, height, width, 3) for `size` = (width, height).
    """
    width, height = size
    image = photo(name)
    image = _cover(image, (max(image.width, 2 * width), max(image.height, height)))
    top = (image.height - height) // 2
    lefts = np.linspace(0, image.width - width, num_frames).round().astype(int)
    crops = [image.crop((left, top, left + width, top + height)) for left in lefts.tolist()]
    return np.stack([np.asarray(crop) for crop in crops])


def video_metadata(num_frames: int, fps: float = 2.0) -> dict[str, Any]:
    """What vLLM's video loader says of a clip of which all frames were kept."""
    return {
        "fps": fps,
        "duration": num_frames / fps,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def video_url(frames: np.ndarray[Any, np.dtype[np.uint8]], fps: float = 2.0) -> str:
    """`frames` (frame, height, width, 3), uint8 RGB, as a data URL of a real MP4 file.

    Encoded with OpenCV, which vLLM itself depends on for reading videos. Raises RuntimeError where
    that OpenCV has no MPEG-4 encoder.
    """
    import cv2

    _, height, width, _ = frames.shape
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "video.mp4")
        fourcc = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(path, fourcc, fps, (width, height))
        if not writer.isOpened():
            raise RuntimeError(
                "OpenCV cannot write MPEG-4 here; install the build that vLLM asks for: "
                "pip install opencv-python-headless"
            )
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[:, :, ::-1]))  # OpenCV's order is BGR
        writer.release()
        return data_url("video/mp4", Path(path).read_bytes())
