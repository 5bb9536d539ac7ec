# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encoder graphs on the CPU: its classes, its protocol methods, its manager, unchanged.

Only the capture is not vLLM's: there is no GPU, so the CPU twin records the forward that the
protocol offers. Attention is the reference attention. What is built here does not depend on
whether the plugin has put this package's classes in place.
"""

from functools import cache, lru_cache
from typing import Any

import managers
import torch
import towers

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm.v1.worker.encoder_cudagraph import BudgetGraphMetadata
from vllm.vit_cudagraph.graphs.recorded import RecordedBackend

# Not from vLLM's module, where the plugin may have put this package's manager in its place.
from vllm.vit_cudagraph.stock_safety import EncoderCudaGraphManager
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings

CPU = torch.device("cpu")
CLASSES: dict[str, type[torch.nn.Module]] = {
    "qwen2_vl": qwen2_vl.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": qwen3_vl.Qwen3VLForConditionalGeneration,
}
FAMILIES = tuple(CLASSES)

MOST_TOKENS = 1024
"""The model length, and so the largest automatic budget: smaller than the default, for time."""


def engine_settings(videos: int | None) -> dict[str, Any]:
    """Arguments of the engine: encoder graphs on, and ``videos`` a prompt (None: no limit)."""
    limit = {} if videos is None else {"limit_mm_per_prompt": {"video": videos}}
    graphs = {"compilation_config": {"cudagraph_mm_encoder": True}}
    return {"max_model_len": MOST_TOKENS} | graphs | limit


@cache
def config(family: str, videos: int | None) -> VllmConfig:
    return towers.make_config(family, **engine_settings(videos))


@cache
def model(family: str, videos: int | None) -> Any:
    """A tiny model of upstream's class, under a limit of ``videos`` a prompt."""
    built = config(family, videos)
    return towers.build_model(family, config=built, model_class=CLASSES[family])


def make_manager(
    served: Any, base: VllmConfig, settings: GraphSettings, *, capture: bool = True
) -> EncoderCudaGraphManager:
    """Upstream's manager of the model ``served``, which was built under ``base``."""
    changed = managers.with_settings(
        base,
        encoder_cudagraph_token_budgets=list(settings.budgets),
        encoder_cudagraph_max_vision_items_per_batch=settings.items,
        encoder_cudagraph_max_frames_per_batch=settings.frames,
    )
    with set_current_vllm_config(changed):
        manager = EncoderCudaGraphManager(changed, CPU, torch.float32, served)
        if capture and manager.get_num_graphs_to_capture():
            plant_graphs(manager)
    return manager


# Few are kept: the graphs of automatic budgets hold some hundred megabytes.
@lru_cache(maxsize=2)
def manager_of(family: str, settings: GraphSettings, videos: int | None) -> EncoderCudaGraphManager:
    """A captured manager, shared by those who ask for the same settings in a row."""
    return make_manager(model(family, videos), config(family, videos), settings)


def plant_graphs(manager: EncoderCudaGraphManager) -> None:
    """What upstream's ``capture`` leaves behind, from the twin instead of a GPU."""
    manager.graph_pool = object()
    for budget in manager.token_budgets:
        slots = (manager.max_batch_size, manager.max_frames_per_batch)
        values = manager.model.prepare_encoder_cudagraph_capture_inputs(
            budget, *slots, CPU, torch.float32
        ).values
        graph, output = RecordedBackend().capture(
            lambda values=values: manager.model.encoder_cudagraph_forward({**values})
        )
        manager._get_graph_set()[budget] = BudgetGraphMetadata(
            budget, *slots, graph, values, output
        )


def poison(manager: EncoderCudaGraphManager) -> None:
    """NaN in every output and in what a graph owns, as a pool may hold from earlier work."""
    with torch.inference_mode():
        for captured in manager._get_graph_set().values():
            captured.output_buffer.fill_(float("nan"))
            for owned in captured.graph.pool_tensors():
                if owned.is_floating_point():
                    owned.fill_(float("nan"))


def check(manager: EncoderCudaGraphManager, batch: Batch, *, replayed: bool = True) -> None:
    """The batch is equal to upstream's ``embed_multimodal``, with NaN in the pool beforehand.

    Args:
        replayed: Also that every item that fits a budget went through a graph. Without it the
            manager may also say None, with which a runner goes on eagerly.

    Raises:
        AssertionError: A value differs, or an item that fits a budget ran eagerly.
        Exception: Whatever upstream's manager raises, which would end the engine.
    """
    kwargs = managers.batch(manager.model, batch.grids, batch.modality, batch.seed)
    before = manager.graph_hits
    poison(manager)
    right_or_declined(manager, kwargs)
    if replayed:
        patches = max(manager.token_budgets) * manager.model.visual.spatial_merge_size**2
        fitting = sum(t * h * w <= patches for t, h, w in batch.grids)
        hits = manager.graph_hits - before
        assert hits == fitting, f"{hits} of {fitting} items that fit a budget were replayed"


def right_or_declined(manager: EncoderCudaGraphManager, kwargs: dict[str, Any]) -> None:
    """``execute`` gives what ``embed_multimodal`` gives, or None."""
    with torch.inference_mode():
        outputs = manager.execute(kwargs)
    if outputs is not None:
        managers.assert_same(outputs, managers.eager(manager.model, kwargs))
