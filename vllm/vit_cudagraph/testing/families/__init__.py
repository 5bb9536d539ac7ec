# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of further families, one module each.

A module gives ``make(path, seed)``, which writes a folder that vLLM can load, and:

* ``PROCESSOR``: ``"real"`` where an installed package ships the family's processor, else one
  sentence that says what stands in for it (``docs/models.md`` quotes it);
* ``WEIGHTS``: whether ``make`` writes weights, so that ``vllm serve`` can serve the folder.

``make_kwargs(model, batch)`` is there where the model's inputs have other names than vLLM's usual
ones (``testing/subject.py``), ``ENGINE`` where ``EngineArgs`` needs arguments, ``SERVE`` where
``vllm serve`` does, ``ENVIRONMENT`` where either needs environment variables, ``NOTE`` where
``docs/models.md`` is to say something of the tests.
"""
