# SPDX-License-Identifier: Apache-2.0
"""``VideoPruningMixin``: video pruning behind encoder graphs, by the model's own post-processing.

With ``--video-pruning-rate`` above 0 vLLM's models append position channels to every item and drop
rows of videos, by what the rows hold; a Qwen3-VL video gets its time stamps as text embeddings too.
How many rows stay depends on no data, which of them does, and neither fits into a graph. So the
graph ends at the tower's rows, and this is done to a whole batch after its graphs, once.

Nothing of it is written here. vLLM's models keep it in three methods, which their
``embed_multimodal`` calls on the tower's rows, and which are called here on the graphs' rows. So
every method that a model lists in ``supported_video_pruning_methods`` works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin

_PARSE = "_parse_and_validate_multimodal_inputs"
_FINISH = {m: f"_postprocess_{m}_embeds_evs" for m in ("image", "video")}


class VideoPruningMixin(WindowedViTCudaGraphMixin):
    """The mixin of a model whose upstream class prunes videos in the three methods above.

    It takes the place of ``WindowedViTCudaGraphMixin`` in front of the model's bases.
    """

    def vit_prunes(self) -> bool:
        """True where the upstream class has the methods, as in vLLM 0.32 and 0.33."""
        return all(hasattr(self, name) for name in (_PARSE, *_FINISH.values()))

    def vit_finish(
        self, outputs: list[torch.Tensor], mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Rows of each item, ``[T, width]``, as ``embed_multimodal`` gives them.

        With pruning on that is ``[T', width + C]``, with ``C`` position channels (4 for Qwen2.5-VL,
        5 for Qwen3-VL). ``T'`` is ``T`` for an image, and for a video what the prompt has room for.

        Args:
            outputs: The tower's rows of each item of a batch, in order.
            mm_kwargs: Of the whole batch, time stamps of videos included.

        Raises:
            ValueError, AssertionError: Upstream's own, where time stamps are missing.
        """
        upstream: Any = self
        if not getattr(upstream, "is_multimodal_pruning_enabled", False):
            return outputs
        ((modality, inputs),) = getattr(upstream, _PARSE)(**mm_kwargs).items()
        return list(getattr(upstream, _FINISH[modality])(tuple(outputs), inputs))
