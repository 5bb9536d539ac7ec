# SPDX-License-Identifier: Apache-2.0
"""Which architectures this package serves, and how vLLM's registry learns of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import vllm
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

logger = init_logger(__name__)

_OURS = "vllm.vit_cudagraph.models"
_UPSTREAM = "vllm.model_executor.models"

MODELS: dict[str, tuple[str, str]] = {
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl", "qwen3_vl_moe"),
}
"""Architecture (the class name, ours and upstream's), our module of it, upstream's module."""


@dataclass(frozen=True)
class LazyModel(_LazyRegisteredModel):
    """A class that vLLM imports when it is asked for.

    vLLM caches what it learns of a class by the hash of the file that defines it. Ours is a thin
    subclass, so that file does not change when upstream's class does: the hash takes in upstream's
    file and vLLM's version as well.
    """

    upstream_module: str = ""

    def _get_modelinfo_module_hash(self, model_path: Path) -> str:
        file = f"{self.upstream_module.rpartition('.')[2]}.py"
        upstream = Path(vllm.__path__[0], "model_executor", "models", file)
        file_hash = _LazyRegisteredModel._get_modelinfo_module_hash
        return "-".join([file_hash(model_path), file_hash(upstream), vllm.__version__])


def register_models() -> None:
    """Replace upstream's entries by ours; an entry that somebody else replaced is left alone."""
    for architecture, (module, upstream_module) in MODELS.items():
        entry = ModelRegistry.models.get(architecture)
        if isinstance(entry, LazyModel):
            continue
        stock = _LazyRegisteredModel(f"{_UPSTREAM}.{upstream_module}", architecture)
        if entry != stock:
            logger.debug("%s is not upstream's own class here; left as it is", architecture)
            continue
        ModelRegistry.models[architecture] = LazyModel(
            f"{_OURS}.{module}", architecture, f"{_UPSTREAM}.{upstream_module}"
        )
