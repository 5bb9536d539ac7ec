# SPDX-License-Identifier: Apache-2.0
"""Which architectures this package serves, and how vLLM's registry learns of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import vllm
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

logger = init_logger(__name__)

_OURS = "vllm.vit_cudagraph.models"
_UPSTREAM = "vllm.model_executor.models"


class Served(NamedTuple):
    """Where an architecture's classes are.

    Attributes:
        module: Ours, in ``vllm.vit_cudagraph.models``.
        upstream: vLLM's: a name in ``vllm.model_executor.models``, or one that starts with
            ``vllm.``.
        class_name: Of both classes; the architecture's own name if empty.
    """

    module: str
    upstream: str
    class_name: str = ""

    @property
    def upstream_module(self) -> str:
        dotted = self.upstream.startswith("vllm.")
        return self.upstream if dotted else f"{_UPSTREAM}.{self.upstream}"


MODELS: dict[str, Served] = {
    "Qwen2VLForConditionalGeneration": Served("qwen2_vl", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": Served("qwen2_5_vl", "qwen2_5_vl"),
    "DotsOCRForCausalLM": Served("dots_ocr", "dots_ocr"),
    "HCXVisionV2ForCausalLM": Served("hyperclovax_vision_v2", "hyperclovax_vision_v2"),
    "LlavaOnevision2ForConditionalGeneration": Served("llava_onevision2", "llava_onevision2"),
    "Qwen2_5OmniModel": Served(
        "qwen2_5_omni", "qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration"
    ),
    "Qwen2_5OmniForConditionalGeneration": Served(
        "qwen2_5_omni", "qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration"
    ),
    "Qwen3VLForConditionalGeneration": Served("qwen3_vl", "qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": Served("qwen3_vl", "qwen3_vl_moe"),
    "OpenPanguVLForConditionalGeneration": Served("openpangu_vl", "openpangu_vl"),
    "KeyeForConditionalGeneration": Served("keye", "keye"),
    "KeyeVL1_5ForConditionalGeneration": Served("keye_vl1_5", "keye_vl1_5"),
    "PaddleOCRVLForConditionalGeneration": Served("paddleocr_vl", "paddleocr_vl"),
    "Ovis2_5": Served("ovis2_5", "ovis2_5"),
    "Ovis2_6ForCausalLM": Served("ovis2_5", "ovis2_5", "Ovis2_5"),
    "Ovis2_6_MoeForCausalLM": Served("ovis2_5", "ovis2_5", "Ovis2_5"),
    "KimiVLForConditionalGeneration": Served("kimi_vl", "kimi_vl"),
    "KimiK25ForConditionalGeneration": Served("kimi_k25", "kimi_k25"),
    "KimiK3ForConditionalGeneration": Served("kimi_k3", "vllm.models.kimi_k3"),
    "Glm4vForConditionalGeneration": Served("glm4_1v", "glm4_1v"),
    "Glm4vMoeForConditionalGeneration": Served("glm4_1v", "glm4_1v"),
    "GlmOcrForConditionalGeneration": Served("glm_ocr", "glm_ocr"),
    "CohereCompassForConditionalGeneration": Served("cohere_compass", "cohere_compass"),
    "KananaVForConditionalGeneration": Served("kanana_v", "kanana_v"),
    "Qwen3OmniMoeForConditionalGeneration": Served(
        "qwen3_omni_moe", "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration"
    ),
    "Qwen3_5ForConditionalGeneration": Served("qwen3_5", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": Served("qwen3_5", "qwen3_5"),
    "Exaone4_5_ForConditionalGeneration": Served("exaone4_5", "exaone4_5"),
    "OpenCUAForConditionalGeneration": Served("opencua", "opencua"),
    "InternS1ProForConditionalGeneration": Served("interns1_pro", "interns1_pro"),
    "InternS2PreviewForConditionalGeneration": Served("interns2_preview", "interns2_preview"),
    "InternS2MobiusForConditionalGeneration": Served("interns2_mobius", "interns2_mobius"),
    "BailingMoeV3VLForConditionalGeneration": Served("bailing_moe_v3_vl", "bailing_moe_v3_vl"),
    "Cosmos3ForConditionalGeneration": Served("cosmos3", "cosmos3"),
    "Cosmos3EdgeForConditionalGeneration": Served("cosmos3_edge", "cosmos3_edge"),
    "ColQwen3": Served("colqwen3", "colqwen3", "ColQwen3Model"),
    "OpsColQwen3Model": Served("colqwen3", "colqwen3", "ColQwen3Model"),
    "Qwen3VLNemotronEmbedModel": Served("colqwen3", "colqwen3", "ColQwen3Model"),
    "ColQwen3_5": Served("colqwen3_5", "colqwen3_5", "ColQwen3_5Model"),
    "JinaVLForRanking": Served("jina_vl", "jina_vl", "JinaVLForSequenceClassification"),
    "Ernie4_5_VLMoeForConditionalGeneration": Served("ernie45_vl", "ernie45_vl"),
    "MiniMaxM3SparseForConditionalGeneration": Served("minimax_m3", "vllm.models.minimax_m3"),
}
"""By architecture, as a checkpoint's configuration names it. One that the installed vLLM does not
know is left out."""


NOT_CAPTURABLE: dict[str, str] = {}
"""Architectures with a vision encoder that no graph can hold, and why: for the documents."""


@dataclass(frozen=True)
class LazyModel(_LazyRegisteredModel):
    """A class that vLLM imports when it is asked for.

    vLLM caches what it learns of a class by the hash of the file that defines it. Ours is a thin
    subclass, so that file does not change when upstream's class does: the hash takes in upstream's
    file and vLLM's version as well.
    """

    upstream_module: str = ""

    def _get_modelinfo_module_hash(self, model_path: Path) -> str:
        module = Path(vllm.__path__[0], *self.upstream_module.split(".")[1:])
        upstream = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        file_hash = _LazyRegisteredModel._get_modelinfo_module_hash
        return "-".join([file_hash(model_path), file_hash(upstream), vllm.__version__])


def register_models() -> None:
    """Replace upstream's entries by ours; an entry that somebody else replaced is left alone."""
    for architecture, served in MODELS.items():
        entry = ModelRegistry.models.get(architecture)
        if entry is None or isinstance(entry, LazyModel):
            continue
        class_name = served.class_name or architecture
        if entry != _LazyRegisteredModel(served.upstream_module, class_name):
            logger.debug("%s is not upstream's own class here; left as it is", architecture)
            continue
        ModelRegistry.models[architecture] = LazyModel(
            f"{_OURS}.{served.module}", class_name, served.upstream_module
        )
