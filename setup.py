# SPDX-License-Identifier: Apache-2.0
"""Build guard and editable install of an overlay package; everything else is in pyproject.toml.

The distribution adds ``vllm/vit_cudagraph/`` to a directory that another distribution, upstream's
vLLM, owns. Two things follow, and setuptools does neither by itself:

* a build must not carry any file that lands on a path of upstream's (``check_overlay``);
* an editable install must not present ``vllm`` as a namespace package (``OverlayEditable``).
"""

import shutil
import sysconfig
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
DISTRIBUTION = "vllm-vit-cudagraph"
OVERLAY = PurePosixPath("vllm/vit_cudagraph")
FINDER = "_vllm_vit_cudagraph_editable"

FINDER_SOURCE = '''\
# Written by the editable install of vllm-vit-cudagraph; removed with it.
import sys
from importlib.util import spec_from_file_location

OVERLAY = {overlay!r}


class OverlayFinder:
    """Serves vllm.vit_cudagraph from the checkout, and keeps `vllm` upstream's.

    setuptools' own finder would declare `vllm` a namespace package, on sys.path. The path finder
    would take that, or a directory `vllm` without __init__.py such as the checkout's, for the
    answer, and an upstream in editable mode, whose finder comes after it, would never be asked.
    """

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "vllm.vit_cudagraph":
            return spec_from_file_location(fullname, OVERLAY + "/__init__.py")
        if fullname != "vllm":
            return None
        for finder in sys.meta_path:
            if finder is cls or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.origin is not None:
                return spec
        return None


def install():
    if OverlayFinder not in sys.meta_path:
        sys.meta_path.insert(0, OverlayFinder)
'''


def upstream_files() -> dict[str, str]:
    """Path relative to site-packages -> name of the vLLM distribution that owns it.

    An isolated build hides the environment from ``sys.path``, not from ``sysconfig``, so the
    environment that a ``pip install .`` goes to is seen here.
    """
    schemes = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    owned: dict[str, str] = {}
    for dist in metadata.distributions(path=sorted(schemes)):
        name = str(dist.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("vllm") and name != DISTRIBUTION:
            owned.update((str(file), name) for file in dist.files or ())
    return owned


def check_overlay(files: Iterable[str], owned: Mapping[str, str]) -> None:
    """Raise ``SetupError`` if one of ``files`` (relative to site-packages) is not ours to write."""
    for file in sorted(files):
        path = PurePosixPath(file)
        if OVERLAY not in path.parents:
            raise SetupError(
                f"{DISTRIBUTION} may only hold files below {OVERLAY}/, and {file} is not: it "
                "would land on vLLM's own package. Move it there, or leave it out of the packages "
                "(a left-over build/ folder: delete it)."
            )
        if file in owned:
            raise SetupError(
                f"{file} belongs to the installed {owned[file]}: that vLLM brings this package "
                f"itself. Do not install {DISTRIBUTION} beside it."
            )


def check_sources() -> None:
    """Raise ``SetupError`` if the checkout itself would stand in for upstream's package."""
    if (ROOT / "vllm" / "__init__.py").exists():
        raise SetupError(
            f"{ROOT / 'vllm' / '__init__.py'} must not exist: it would replace vLLM's own. "
            "Delete it."
        )


def files_below(folder: Path) -> list[str]:
    """Every file below ``folder``, relative to it."""
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


class OverlayBuild(build_py):
    """``build_py`` that refuses what would land on upstream's paths."""

    def run(self) -> None:
        if self.editable_mode:  # nothing is copied; OverlayEditable has looked already
            return
        check_sources()
        built = Path(self.build_lib)
        # The wheel takes the whole folder, so a module that an older build left would go along.
        shutil.rmtree(built / OVERLAY, ignore_errors=True)
        super().run()
        check_overlay(files_below(built), upstream_files())


class OverlayStrategy:
    """What setuptools calls an editable strategy: it writes the files of the editable wheel."""

    def __enter__(self) -> "OverlayStrategy":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __call__(self, wheel, files, mapping) -> None:
        source = FINDER_SOURCE.format(overlay=(ROOT / OVERLAY).as_posix())
        wheel.writestr(f"{FINDER}.py", source.encode())
        wheel.writestr(f"{FINDER}.pth", f"import {FINDER}; {FINDER}.install()\n".encode())


class OverlayEditable(editable_wheel):
    """``editable_wheel`` that leaves ``vllm`` to upstream."""

    def run(self) -> None:
        check_sources()
        sources = files_below(ROOT / OVERLAY)
        check_overlay([(OVERLAY / file).as_posix() for file in sources], upstream_files())
        super().run()

    def _select_strategy(self, name, tag, build_lib):
        return OverlayStrategy()


if __name__ == "__main__":
    # Beside the package, setuptools' record of it would be what Python finds first from here, and
    # it outlives its install; below build/ it is out of the way.
    (ROOT / "build").mkdir(exist_ok=True)
    setup(
        cmdclass={"build_py": OverlayBuild, "editable_wheel": OverlayEditable},
        options={"egg_info": {"egg_base": "build"}},
    )
