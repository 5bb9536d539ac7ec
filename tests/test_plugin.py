# SPDX-License-Identifier: Apache-2.0
"""The plugin: what it registers, that a class is upstream's to the rest of vLLM, when it stays out.

What changes a process's vLLM is tried in processes of their own.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import managers
import pytest

import vllm
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.worker import encoder_cudagraph
from vllm.vit_cudagraph import contract, plugin
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.registration import MODELS, LazyModel, register_models


def in_a_process(script: str, **environment: str) -> tuple[Any, str]:
    """Run a script; give the JSON of its last line of output, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"} | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def upstream_class(architecture: str) -> Any:
    served = MODELS[architecture]
    module = importlib.import_module(served.upstream_module)
    return getattr(module, served.class_name or architecture)


def our_class(architecture: str) -> Any:
    plugin.register()
    return registry.ModelRegistry.models[architecture].load_model_cls()


HERE = [name for name in MODELS if name in registry.ModelRegistry.models]
"""The architectures that the installed vLLM knows."""


@pytest.mark.parametrize("architecture", HERE)
def test_to_the_rest_of_vllm_the_class_is_upstreams(architecture: str) -> None:
    ours, theirs = our_class(architecture), upstream_class(architecture)
    assert ours is not theirs and issubclass(ours, theirs)
    assert issubclass(ours, WindowedViTCudaGraphMixin) and supports_encoder_cudagraph(ours)
    info = registry._ModelInfo.from_model_cls
    assert asdict(info(ours)) == asdict(info(theirs))
    for name in ("_processor_factory", "hf_to_vllm_mapper", "packed_modules_mapping"):
        assert getattr(ours, name, None) is getattr(theirs, name, None), name
    supports = [name for name in dir(theirs) if name.startswith(("supports_", "supported_"))]
    assert supports
    for name in supports:
        assert getattr(ours, name) == getattr(theirs, name), name
    added = set(vars(ours)) - {"__module__", "__doc__", "__abstractmethods__", "_abc_impl"}
    hooks = {name for name in vars(WindowedViTCudaGraphMixin) if name.startswith("vit_")}
    allowed = hooks | {"_is_protocol", "_is_runtime_protocol"}
    assert {name for name in added if not name.startswith("__")} <= allowed


def test_vllm_finds_the_processor() -> None:
    config = managers.config("qwen2_5_vl").model_config
    info = MULTIMODAL_REGISTRY.get_processing_info(config)
    assert type(info).__module__ == "vllm.model_executor.models.qwen2_5_vl"


def test_register_twice_is_once() -> None:
    plugin.register()
    before = dict(registry.ModelRegistry.models)
    plugin.register()
    assert before == registry.ModelRegistry.models
    assert all(isinstance(registry.ModelRegistry.models[name], LazyModel) for name in HERE)
    assert encoder_cudagraph.EncoderCudaGraphManager is EncoderGraphManager
    assert not issubclass(EncoderGraphManager.__mro__[2], EncoderGraphManager)


def test_the_v2_runners_bound_name_is_replaced_too() -> None:
    """`model_states.interface` binds the name at import; here it is imported before `register`."""
    found, _ = in_a_process(
        "import json\n"
        "import vllm.v1.worker.gpu.model_states.interface as interface\n"
        "stock = interface.EncoderCudaGraphManager.__module__\n"
        "from vllm.vit_cudagraph.plugin import register; register()\n"
        "print(json.dumps([stock, interface.EncoderCudaGraphManager.__module__]))\n"
    )
    assert found == ["vllm.v1.worker.encoder_cudagraph", "vllm.vit_cudagraph.manager"]


def test_somebody_elses_model_is_left_alone() -> None:
    other = registry._LazyRegisteredModel("elsewhere.models", "Qwen2VLForConditionalGeneration")
    with mock.patch.dict(registry.ModelRegistry.models, {"Qwen2VLForConditionalGeneration": other}):
        register_models()
        assert registry.ModelRegistry.models["Qwen2VLForConditionalGeneration"] is other


def test_a_cached_inspection_does_not_outlive_upstreams_version(tmp_path: Path) -> None:
    model = LazyModel("vllm.vit_cudagraph.models.qwen2_vl", "Qwen2VLForConditionalGeneration")
    entry = LazyModel(model.module_name, model.class_name, "vllm.model_executor.models.qwen2_vl")
    ours = Path(plugin.__file__).parent / "models" / "qwen2_vl.py"
    now = entry._get_modelinfo_module_hash(ours)
    assert now == entry._get_modelinfo_module_hash(ours)
    with mock.patch.object(vllm, "__version__", "0.33.1"):
        assert entry._get_modelinfo_module_hash(ours) != now
    models = tmp_path / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "qwen2_vl.py").write_text("# another upstream\n")
    with mock.patch.object(vllm, "__path__", [str(tmp_path)]):
        assert entry._get_modelinfo_module_hash(ours) != now


# -- staying out -------------------------------------------------------------------------------

STATE = """
import json
import vllm
{before}
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.worker.encoder_cudagraph as upstream
from vllm.model_executor.models.registry import ModelRegistry
entry = ModelRegistry.models["Qwen2_5_VLForConditionalGeneration"]
print(json.dumps([upstream.EncoderCudaGraphManager.__module__, entry.module_name]))
"""
STOCK = ["vllm.v1.worker.encoder_cudagraph", "vllm.model_executor.models.qwen2_5_vl"]
OURS = ["vllm.vit_cudagraph.manager", "vllm.vit_cudagraph.models.qwen2_5_vl"]


def test_installed_it_is_found_and_silent() -> None:
    state, log = in_a_process(STATE.format(before=""))
    assert state == OURS
    assert "vit_cudagraph" not in log.replace(json.dumps(OURS), "")


def test_vllm_plugins_switches_it_off() -> None:
    assert in_a_process(STATE.format(before=""), VLLM_PLUGINS="")[0] == STOCK


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "0.34.0.dev12+g1234", "0.40"])
def test_unsupported_versions(version: str) -> None:
    said = contract.unsupported_version(version)
    assert said is not None and version in said and "<0.34,>=0.32" in said


def test_beside_an_unsupported_version_it_does_nothing() -> None:
    """Stock vLLM, one clear warning, and none from a process that inherits the environment."""
    script = STATE.format(before="vllm.__version__ = '0.34.0.dev12+g1234'")
    marked, log = in_a_process(
        script + f"import os\nprint(json.dumps(os.environ[{plugin.WARNED!r}]))\n"
    )
    assert marked == "1" and json.dumps(STOCK) in log
    said = [line for line in log.splitlines() if "vllm-vit-cudagraph does nothing" in line]
    assert len(said) == 1 and "0.34.0.dev12+g1234" in said[0]
    assert "Install 'vllm<0.34,>=0.32'" in said[0]
    state, child_log = in_a_process(script, **{plugin.WARNED: "1"})
    assert state == STOCK and "vllm-vit-cudagraph" not in child_log


def test_a_changed_upstream_piece_is_named() -> None:
    before = (
        "from vllm.v1.worker import encoder_cudagraph as e\n"
        "e.EncoderCudaGraphManager.execute = lambda self, mm_kwargs, lora: None\n"
    )
    state, log = in_a_process(STATE.format(before=before))
    assert state == STOCK
    assert (
        "EncoderCudaGraphManager.execute has (self, mm_kwargs, lora), not (self, mm_kwargs)" in log
    )


@pytest.mark.parametrize(
    "before",
    [
        "import sys; sys.modules['vllm.vit_cudagraph.manager'] = None",
        "import vllm.model_executor.models.utils as u; del u.StageMissingLayer",
        "from vllm.vit_cudagraph import contract; contract.broken_pieces = lambda: 1 / 0",
    ],
    ids=["our own import fails", "a name is gone", "the check itself fails"],
)
def test_register_never_raises_and_changes_all_or_nothing(before: str) -> None:
    """vLLM does not guard the call: an error here would end the server, asked for or not."""
    state, log = in_a_process(STATE.format(before=before))
    assert state == STOCK
    assert sum("vllm-vit-cudagraph does nothing" in line for line in log.splitlines()) == 1


def test_contract_holds_here_and_each_kind_of_break_is_seen() -> None:
    assert contract.broken_pieces() == []
    assert contract.unsupported_version(vllm.__version__) is None
    gone = {"vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager.gone": "self"}
    with mock.patch.object(contract, "SIGNATURES", gone):
        assert "has no attribute 'gone'" in contract.broken_pieces()[0]
    fields = {"vllm.v1.worker.encoder_cudagraph_defs:EncoderItemSpec": "input_size"}
    with mock.patch.object(contract, "FIELDS", fields):
        assert contract.broken_pieces()[0].endswith("not (input_size)")
    missing = {"vllm.v1.worker.nowhere:Thing": "a"}
    with mock.patch.object(contract, "FIELDS", missing):
        assert "nowhere" in contract.broken_pieces()[0]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.2rc1"])
def test_supported_versions(version: str) -> None:
    assert contract.unsupported_version(version) is None


def test_register_imports_little() -> None:
    """Printed for the documents; the bound here is on work, not on time: no model is imported."""
    script = (
        "import json, sys, time\n"
        "import vllm.engine.arg_utils\n"
        "start = time.perf_counter()\n"
        "from vllm.vit_cudagraph.plugin import register; register()\n"
        "took = time.perf_counter() - start\n"
        "models = [m for m in sys.modules if m.startswith('vllm.vit_cudagraph.models')]\n"
        "cuda = sys.modules['torch'].cuda.is_initialized()\n"
        "print(json.dumps([models, cuda, took]))\n"
    )
    start = time.perf_counter()
    (models, cuda, took), _ = in_a_process(script)
    print(f"register: {took:.2f} s of {time.perf_counter() - start:.1f} s")
    assert models == [] and not cuda
