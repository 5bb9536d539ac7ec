# SPDX-License-Identifier: Apache-2.0
"""The entry point (group ``vllm.general_plugins``): checks, registers models, swaps the manager.

vLLM calls :func:`register` in every process, sometimes more than once, and hands it no
configuration. It is silent on a supported version; what it changes takes effect only where
``cudagraph_mm_encoder`` is on.

The one seam that is patched: the name ``EncoderCudaGraphManager`` in
``vllm.v1.worker.encoder_cudagraph``, which both runners look up, and in the V2 runner's
``model_states.interface``, which binds it at import. There is no option for it in vLLM. It is
guarded by the contract check: on any mismatch stock vLLM stays as it is.
"""

from __future__ import annotations

import os
import sys

import vllm
from vllm.logger import init_logger
from vllm.vit_cudagraph import contract
from vllm.vit_cudagraph.failures import brief

logger = init_logger(__name__)

WARNED = "VIT_CUDAGRAPH_WARNED"
"""Set by the first process that warns, so that those which inherit its environment do not."""


def register() -> None:
    """Put this package's models and manager in place of upstream's. Safe to call again.

    On an unsupported version, a broken contract or any error nothing is changed, and the first
    process says so in one warning: vLLM does not guard this call, so it must not raise.
    """
    try:
        problem = contract.unsupported_version(vllm.__version__)
        if problem is None:
            problem = "; ".join(contract.broken_pieces()) or None
        if problem is None:
            _put_in_place()
    except Exception as error:
        problem = brief(error)
    if problem is not None:
        _warn_once(problem)


def _put_in_place() -> None:
    # Imported only now: on an unsupported version these may not even import. And all of them
    # before the first change, so that a failure leaves nothing half done.
    from vllm.v1.worker import encoder_cudagraph
    from vllm.vit_cudagraph import metrics
    from vllm.vit_cudagraph.manager import EncoderGraphManager
    from vllm.vit_cudagraph.registration import register_models

    register_models()
    encoder_cudagraph.EncoderCudaGraphManager = EncoderGraphManager
    bound = sys.modules.get("vllm.v1.worker.gpu.model_states.interface")
    if bound is not None:
        bound.EncoderCudaGraphManager = EncoderGraphManager  # type: ignore[attr-defined]
    metrics.prepare()


def _warn_once(problem: str) -> None:
    if os.environ.get(WARNED) != "1":
        os.environ[WARNED] = "1"
        logger.warning(
            "vllm-vit-cudagraph does nothing here, vLLM runs as it is: %s. Install "
            "'vllm%s', or uninstall vllm-vit-cudagraph.",
            problem,
            contract.SUPPORTED,
        )
