# SPDX-License-Identifier: Apache-2.0
"""Tools for tests and for authors of models; serving imports nothing of it unless asked to.

For the test module of a model (``docs/adding-a-model.md``, "Conformance"):

| From | Import | For |
|---|---|---|
| ``conformance`` | ``EncoderGraphConformance`` | the base class of a model's tests |
| ``subject`` | ``Subject``, ``make_kwargs`` | a model, its configuration, its inputs |
| ``models`` | ``make_config``, ``build_model``, ``load_weights``, ``with_vision`` | building it |
| ``models`` | ``place`` | where it runs, by environment variables |
| ``strategies`` | ``Batch``, ``GraphSettings``, ``vision_configs`` | cases, and what is captured |
| ``oracles`` | ``TransformersTower``, ``Mismatch`` | a reference by others; the failure |
| ``profiles`` | ``load``, ``examples`` | ``conftest.py``; how many examples |

Behind it, for who changes the suite (``docs/testing.md``):

| Module | Has |
|---|---|
| ``histories`` | a state machine over one manager |
| ``defects`` | explicit examples of what stock graphs did wrong |
| ``faults`` | planted faults |
| ``synthetic`` | a tower of any geometry, and a reference that knows coordinates alone |
| ``pool`` | NaN in the free memory of a CUDA graph's pool |
| ``reference_attention`` | the twin's attention |
| ``checkpoints`` | tiny checkpoints of the families |
| ``cpu_worker``, ``serving``, ``photos`` | a real server on the twin, and requests to it |

Nothing is imported here: ``conformance`` needs pytest and hypothesis; ``subject``, ``histories``,
``strategies``, ``defects``, ``synthetic`` and ``profiles`` need hypothesis. Both come with the
extra ``test``.
"""
