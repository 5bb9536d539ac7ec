# SPDX-License-Identifier: Apache-2.0
"""This package's own settings: ``--additional-config '{"vit_cudagraph": {"tower": false}}'``.

vLLM hands ``additional_config`` to every process as it stands. Everything else is set by vLLM's own
flags.
"""

from __future__ import annotations

from typing import Any

NAME = "vit_cudagraph"
"""The entry of ``additional_config`` that is ours."""

TOWER = "tower"
"""Whether the tower's layers may be replaced by faster ones with equal values; true by default."""


def tower_work(vllm_config: Any) -> bool:
    """The setting :data:`TOWER`.

    Raises:
        ValueError: An unknown setting, or a value that is no boolean.
    """
    given = vllm_config.additional_config
    ours = given.get(NAME, {}) if isinstance(given, dict) else {}
    if not isinstance(ours, dict) or not ours.keys() <= {TOWER}:
        raise ValueError(
            f"additional_config[{NAME!r}] is {ours!r}: it may hold {TOWER!r}, "
            f'for example {{"{NAME}": {{"{TOWER}": false}}}}'
        )
    value = ours.get(TOWER, True)
    if not isinstance(value, bool):
        raise ValueError(
            f"additional_config[{NAME!r}][{TOWER!r}] is {value!r}: set it to true or false"
        )
    return value
