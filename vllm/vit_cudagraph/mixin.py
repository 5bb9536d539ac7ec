# SPDX-License-Identifier: Apache-2.0
"""``WindowedViTCudaGraphMixin``: vLLM's encoder CUDA graph protocol out of geometry hooks.

A model puts the mixin in front of its bases and overrides ``vit_geometry``; every other hook has a
default (``docs/adding-a-model.md``). The mixin never asks which model it serves.

The eager path and the graph path are the same calls, with and without padding::

    eager:  split(vit_project(vit_forward(pixels, vit_metadata(grids)), grids))
    graph:  the same, where vit_forward ran inside a graph over buffers filled with the same tensors
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch

from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph_defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPaddingLogic,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from vllm.vit_cudagraph.buffers import Buffers, SharedRows, allocate
from vllm.vit_cudagraph.eligibility import model_refusal, runner_refusal
from vllm.vit_cudagraph.geometry import (
    MALFORMED,
    PIXELS,
    Capacity,
    Grid,
    Limits,
    NotCapturable,
    ViTGeometry,
)
from vllm.vit_cudagraph.metadata import Exact, MetadataBuilder, fill, pad_of
from vllm.vit_cudagraph.planning import MIN_TOKEN_BUDGET
from vllm.vit_cudagraph.tower import clear_padding, complete, install

logger = init_logger(__name__)


@dataclass(frozen=True)
class ViTInputs:
    """One modality's items, as the tower takes them.

    Attributes:
        modality: vLLM's name for it.
        pixels: Pixel rows of all items in order, ``[N, *pixel_row]``.
        grids: One an item, on the host.
        keys: The names that pixels and grids have in ``mm_kwargs``.
    """

    modality: str
    pixels: torch.Tensor
    grids: list[Grid]
    keys: tuple[str, str]

    def pieces(self, ends: Sequence[int], items: Sequence[int]) -> list[torch.Tensor]:
        """Pixels of some items: views, one for each run of neighbours.

        Args:
            ends: Patches before each item, and of all.
            items: Ascending.
        """
        runs: list[list[int]] = []
        for item in items:
            if runs and runs[-1][1] == item:
                runs[-1][1] += 1
            else:
                runs.append([item, item + 1])
        return [self.pixels[ends[start] : ends[stop]] for start, stop in runs]


class WindowedViTCudaGraphMixin:
    """Encoder CUDA graphs for any tower that declares its geometry.

    It has all of vLLM's protocol ``SupportsEncoderCudaGraph`` without inheriting from it: before a
    model whose own bases lack the protocol it would come first, and its ``__init__``, which calls
    no other, would take the place of the model's.

    Put it in front of the model's bases. The model holds its tower as ``self.visual``, or overrides
    :meth:`vit_tower`.
    """

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True
    visual: Any

    def __init__(self, *, vllm_config: Any = None, prefix: str | None = None) -> None:
        if vllm_config:
            # Most models keep it, not all; one reads it before it would have kept it.
            self.model_config = vllm_config.model_config
        # A model's own default for the prefix is left to it.
        given = {"vllm_config": vllm_config, "prefix": prefix}
        super().__init__(**{name: value for name, value in given.items() if value is not None})
        if vllm_config and not hasattr(self, "model_config"):  # most models keep it, not all
            self.model_config = vllm_config.model_config
        never = vllm_config and is_global_first_rank() and runner_refusal(vllm_config)
        if never:
            logger.warning("Encoder CUDA graphs are off: %s", never)
        if vllm_config:
            complete(self.vit_tower())
            install(self.vit_tower(), vllm_config)

    # -- hooks ---------------------------------------------------------------------------------

    def vit_geometry(self) -> ViTGeometry:
        """What the tower declares about itself. Required; called once."""
        raise NotImplementedError(f"{type(self).__name__} must define vit_geometry()")

    def vit_tower(self) -> Any:
        """The vision tower."""
        return self.visual

    def vit_modules(self) -> Sequence[Any]:
        """Modules that :meth:`vit_forward` runs: graphs read their weights."""
        return (self.vit_tower(),)

    def vit_output_width(self) -> int:
        """Width of the final embeddings: as the last of :meth:`vit_modules` says, or, where it does
        not, that of what they are embedded in."""
        width = getattr(self.vit_modules()[-1], "out_hidden_size", None)
        return width or self.model_config.get_inputs_embeds_size()

    def vit_keys(self, modality: str) -> tuple[str, str]:
        """Names of a modality's pixels and grids in ``mm_kwargs``."""
        suffix = "" if modality == "image" else f"_{modality}s"
        return f"pixel_values{suffix}", f"{modality}_grid_thw"

    def vit_inputs(self, mm_kwargs: Mapping[str, Any]) -> ViTInputs:
        """Find the modality, the pixel rows and the grids in one modality's ``mm_kwargs``. Pixels
        may come in one tensor an item, stacked where all have one size.

        Raises:
            NotCapturable: No pixels (precomputed embeddings), or no grids.
        """
        keys = {m: self.vit_keys(m) for m in self.vit_declared.modalities}
        named = [m for m in keys if mm_kwargs.get(keys[m][1]) is not None]
        if len(named) > 1:
            raise NotCapturable("more than one modality in a batch", ", ".join(named))
        if not named:
            raise NotCapturable(MALFORMED, f"no grids among {sorted(mm_kwargs)}")
        (modality,) = named
        pixels, grids = (mm_kwargs.get(key) for key in keys[modality])
        if pixels is None:
            raise NotCapturable("precomputed embeddings", f"no {keys[modality][0]}")
        if self._vit_one_each(pixels):
            stacked = isinstance(pixels, torch.Tensor)
            pixels = pixels.flatten(0, 1) if stacked else torch.cat(list(pixels))
        return ViTInputs(modality, pixels, _host_grids(grids), keys[modality])

    def _vit_one_each(self, pixels: Any) -> bool:
        """Whether pixels come in one tensor an item."""
        if isinstance(pixels, torch.Tensor):
            return pixels.ndim == len(self.vit_declared.pixel_row) + 2
        tensors = isinstance(pixels, (list, tuple)) and len(pixels) > 0
        return tensors and all(isinstance(one, torch.Tensor) for one in pixels)

    def vit_repack(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        """The same kwargs for some items, in that order: pixels and grids, in the form they have
        there."""
        inputs = self.vit_inputs(mm_kwargs)
        pixels, grids = (mm_kwargs[key] for key in inputs.keys)
        numbers = grids.shape[-1] if isinstance(grids, torch.Tensor) else 3
        chosen: Any = [inputs.grids[i][-numbers:] for i in items]
        if isinstance(grids, torch.Tensor) and grids.ndim == 3:
            # Where upstream's own code, which an eager run goes through, expects them.
            chosen = grids.new_tensor(chosen)[:, None]
        if self._vit_one_each(pixels):
            rows: Any = of_items(pixels, items)
        else:
            # Neighbours in order are one slice: nothing is copied.
            pieces = replace(inputs, pixels=pixels).pieces(self.vit_ends(inputs.grids), items)
            rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [pixels[:0]])
        return dict(zip(inputs.keys, (rows, chosen), strict=True))

    def vit_capturable(self, grid: Grid) -> bool:
        """Whether one item may go through a graph at all."""
        return True

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        """Rows of one item that depend on its grid alone, by name; the result is cached."""
        return self.vit_tower().prepare_encoder_metadata([list(grid)])

    def vit_learned_rows(self, grids: Sequence[Grid]) -> Mapping[str, Any]:
        """Rows that depend on weights as well, for several items, by name; never cached."""
        return self.vit_tower().prepare_encoder_metadata([list(grid) for grid in grids])

    def vit_metadata(
        self, grids: Sequence[Grid], device: torch.device
    ) -> dict[str, torch.Tensor | None]:
        """Exact and unpadded metadata of some items: what :meth:`vit_forward` reads."""
        return self._vit_builder.build(grids, device)

    def vit_eager(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """What runs without a graph: :meth:`vit_forward` over exact metadata."""
        return self.vit_forward(pixels, self.vit_metadata(grids, device_of(self.vit_tower())))

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        """The tower, ``[N, *pixel_row]`` to ``[tower rows, width]``. Must be capturable, and must
        not write to its metadata: a replay of the same grids reads what the last one left there."""
        return self.vit_tower()(pixels, None, encoder_metadata=metadata)

    def vit_project(self, rows: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Work of one step after the tower that cannot be captured; gives output-token rows."""
        return rows

    def vit_finish(
        self, outputs: list[torch.Tensor], mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Work of the whole batch, once, over all items in order, with the runner's kwargs."""
        return outputs

    def vit_items(self, inputs: ViTInputs, mm_kwargs: Mapping[str, Any]) -> list[int]:
        """How many grids each item of the runner's has. More than one goes with a
        :meth:`vit_finish` that joins them."""
        return [1] * len(inputs.grids)

    def vit_prunes(self) -> bool:
        """Whether :meth:`vit_finish` does the model's video pruning (see ``pruning.py``). Where it
        does not, nothing is captured while pruning is on."""
        return False

    # -- derived -------------------------------------------------------------------------------

    @cached_property
    def vit_declared(self) -> ViTGeometry:
        """The geometry, read once."""
        return self.vit_geometry()

    def vit_ends(self, grids: Sequence[Grid]) -> list[int]:
        """Patches before each item, and of all: one number more than items."""
        return [0, *accumulate(map(self.vit_declared.patches, grids))]

    @cached_property
    def _vit_builder(self) -> MetadataBuilder:
        return MetadataBuilder(
            geometry=self.vit_declared,
            tower=self.vit_tower(),
            position_rows=self.vit_position_rows,
            learned_rows=self.vit_learned_rows,
        )

    def load_weights(self, weights: Any) -> Any:
        """The model's own, counted: a manager then looks whether weights lie where they lay."""
        self.vit_weight_loads = getattr(self, "vit_weight_loads", 0) + 1
        loaded = super().load_weights(weights)  # type: ignore[misc]
        clear_padding(self.vit_tower())
        return loaded

    def vit_weight_addresses(self) -> dict[str, int]:
        """Where parameters and buffers of :meth:`vit_modules` lie; graphs read them there."""
        return {
            f"{number}.{name}": tensor.data_ptr()
            for number, module in enumerate(self.vit_modules())
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }

    def vit_checked_inputs(self, mm_kwargs: Mapping[str, Any]) -> ViTInputs:
        """:meth:`vit_inputs`, with the pixels held against the grids.

        Raises:
            NotCapturable: The pixels are no tensor, a grid is malformed, or the rows do not match.
        """
        inputs = self.vit_inputs(mm_kwargs)
        if not isinstance(inputs.pixels, torch.Tensor):
            raise NotCapturable(MALFORMED, f"{inputs.keys[0]} is not one tensor")
        expected = sum(map(self.vit_declared.checked_patches, inputs.grids))
        if len(inputs.pixels) != expected:
            raise NotCapturable(
                MALFORMED,
                f"{inputs.keys[0]} has {len(inputs.pixels)} rows, its grids ask for {expected}",
            )
        return inputs

    def _vit_paddings(self) -> dict[str, EncoderCudaGraphPaddingLogic]:
        """How each buffer is filled. Unused pixel rows are 0, so that nothing of one batch lies
        beside another."""
        rows = self.vit_declared.rows.items()
        tails = {name: pad_of(self._vit_builder, row) for name, row in rows} | {PIXELS: "zero"}
        return {name: partial(fill, pad=pad) for name, pad in tails.items()}

    def vit_pixel_buffer(
        self, patches: int, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """Pixel rows ``[patches, *pixel_row]``, all 0, in the dtype that the tower's input norm
        wants."""
        return torch.zeros(
            (patches, *self.vit_declared.pixel_row),
            device=device,
            dtype=normed_dtype(self.vit_tower()) or dtype,
        )

    def vit_buffers(self, capacity: Capacity, pixels: SharedRows) -> Buffers:
        """Buffers that a graph of ``capacity`` reads: a prefix of ``pixels``, and every metadata
        tensor at its capacity."""
        # The hook itself is probed, so that a name that only an override makes has a buffer too.
        smallest = self.vit_metadata([self.vit_declared.smallest_grid()], pixels.rows.device)
        return allocate(self._vit_builder, smallest, capacity, pixels)

    def vit_metadata_parts(
        self, grids: Sequence[Grid], device: torch.device
    ) -> Mapping[str, Exact | None]:
        """What :meth:`vit_metadata` gives, before it is joined and moved; just that, where a model
        overrides it."""
        if self._vit_builds_metadata():
            return self._vit_builder.parts(grids)
        return self.vit_metadata(grids, device)

    def vit_metadata_key(self, grids: Sequence[Grid]) -> Hashable | None:
        """Steps with the same key have the same metadata. None where it may depend on more than
        grids: on weights, or on whatever a model's own :meth:`vit_metadata` reads."""
        return self._vit_builder.key(grids) if self._vit_builds_metadata() else None

    def _vit_builds_metadata(self) -> bool:
        """Whether :meth:`vit_metadata` and its parts are those above."""
        return all(
            getattr(getattr(self, name), "__func__", None)
            is getattr(WindowedViTCudaGraphMixin, name)
            for name in ("vit_metadata", "vit_metadata_parts")
        )

    def vit_split(self, rows: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Project one step's rows, and split them into items, which are views.

        Raises:
            RuntimeError: The rows are not as many as geometry and grids ask for: a wrong geometry
                must not split rows among items in a plausible way.
        """
        self._check_rows("the tower", len(rows), self.vit_declared.tower_rows(grids))
        rows = self.vit_project(rows, grids)
        tokens = [self.vit_declared.output_tokens(grid) for grid in grids]
        self._check_rows("vit_project", len(rows), sum(tokens))
        return list(rows.split(tokens))

    # -- vLLM's protocol -----------------------------------------------------------------------

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """No modality is offered where the tower cannot be captured (see ``eligibility``)."""
        tower, frames = self.vit_tower(), self.get_max_frames_per_video()
        if model_refusal(self, tower) is not None:
            return EncoderCudaGraphConfig([], [PIXELS], 0, max_frames_per_video=frames)
        limit = self.model_config.multimodal_config.get_limit_per_prompt
        return EncoderCudaGraphConfig(
            modalities=[m for m in self.vit_declared.modalities if limit(m)],
            buffer_keys=[PIXELS, *self.vit_declared.rows],
            out_hidden_size=self.vit_output_width(),
            padding_logics=self._vit_paddings(),
            max_frames_per_video=frames,
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        return self.vit_inputs(mm_kwargs).modality

    def get_max_frames_per_video(self) -> int:
        """A bound: each frame gives at least one token of the context."""
        return self.model_config.max_model_len

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """From a 224 x 224 image to the most tokens that one step can schedule."""
        largest = min(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len,
        )
        return min(MIN_TOKEN_BUDGET, largest), largest

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Sizes of each item. Its charge against a budget is ``max(tokens, sequences)``, so that a
        packer that knows one number an item cannot overflow the sequence slots: the protocol's own
        buffers have one slot a token."""
        specs = []
        for grid in self.vit_inputs(mm_kwargs).grids:
            use = self.vit_declared.usage(grid)
            charge = {"default": max(use.tokens, use.sequences)}
            specs.append(EncoderItemSpec(use.patches, use.tokens, charge))
        return specs

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        return self.vit_repack(mm_kwargs, indices)

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        limits = Limits(items=max_batch_size, tokens_per_sequence=1)
        capacity = self.vit_declared.capacity(token_budget, limits)
        pixels = SharedRows(self.vit_pixel_buffer(capacity.patches, device, dtype))
        return EncoderCudaGraphCaptureInputs(values=self.vit_buffers(capacity, pixels).named)

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = "default",
    ) -> EncoderCudaGraphReplayBuffers:
        """Exact values; tails are the manager's, by the configuration's padding logics."""
        inputs = self.vit_checked_inputs(mm_kwargs)
        metadata = self.vit_metadata(inputs.grids, inputs.pixels.device)
        return EncoderCudaGraphReplayBuffers(values={PIXELS: inputs.pixels, **metadata})

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        metadata: dict[str, torch.Tensor | None] = dict.fromkeys(self.vit_declared.rows)
        metadata.update({name: rows for name, rows in inputs.items() if name != PIXELS})
        return self.vit_forward(inputs[PIXELS], metadata)

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        inputs = self.vit_inputs(mm_kwargs)
        return self.vit_eager(inputs.pixels, inputs.grids)

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, torch.Tensor] | list[torch.Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Cut padding off, project, and split into items. With ``clone`` the rows are copied once
        and items are views of the copy, so that no later replay overwrites what was handed out."""
        assert batch_mm_kwargs is not None
        grids, rows = self.vit_inputs(batch_mm_kwargs).grids, outputs["default"]
        if clone:  # a replay has rows of padding after its own; an eager run has none
            rows = rows[: self.vit_declared.tower_rows(grids)].clone()
        for index, item in zip(indices, self.vit_split(rows, grids), strict=True):
            dest[index] = item

    def _check_rows(self, maker: str, rows: int, expected: int) -> None:
        if rows != expected:
            raise RuntimeError(
                f"{maker} of {type(self).__name__} gave {rows} rows where vit_geometry() and the "
                f"grids ask for {expected}"
            )


def of_items(field: Any, items: Sequence[int]) -> Any:
    """A batched field's values for some items: stacked where they are, else in a list."""
    chosen = [field[i] for i in items]
    return torch.stack(chosen) if isinstance(field, torch.Tensor) else chosen


def device_of(tower: Any) -> torch.device:
    """Where the tower's weights are."""
    device = getattr(tower, "device", None)
    return next(tower.parameters()).device if device is None else device


def normed_dtype(tower: Any) -> torch.dtype | None:
    """Dtype of pixels that the tower, or its patch embedding, normalises itself."""
    for module in (tower, getattr(tower, "patch_embed", None)):
        if (dtype := getattr(getattr(module, "input_norm", None), "input_dtype", None)) is not None:
            return dtype
    return None


def _host_grids(grids: Any) -> list[Grid]:
    """Grids as tuples of Python numbers; vLLM keeps them on the host (``keep_on_cpu``). Where an
    item has rows and columns alone, it is one frame."""
    if isinstance(grids, torch.Tensor):
        if grids.ndim == 3 and grids.shape[1] == 1:
            grids = grids[:, 0]  # each item's own table of one grid
        if grids.ndim != 2 or grids.shape[1] not in (2, 3):
            raise NotCapturable(MALFORMED, f"grids of shape {tuple(grids.shape)}, not (items, 3)")
        grids = grids.tolist()
    frame = () if grids and len(grids[0]) == 3 else (1,)
    return [(*frame, *map(int, grid)) for grid in grids]
