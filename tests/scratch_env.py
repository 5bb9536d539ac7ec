# SPDX-License-Identifier: Apache-2.0
"""Small virtual environments for the tests of packaging: no network, nothing big copied."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib"))
SOURCES = ("pyproject.toml", "setup.py", "LICENSE", "README.md", "vllm", "tests/tools")
LIMIT_S = 240


def clean_environ(**extra: str) -> dict[str, str]:
    """The process environment without what would lead an interpreter elsewhere."""
    dropped = ("PYTHON", "VLLM_", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | extra


def run(*command: str | Path, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd``; stdout and stderr come back as text, together in stdout."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environ(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def copy_sources(target: Path) -> Path:
    """Copy what a build needs, so that no build touches the checkout."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / name, ignore=skip)
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    return target


class ScratchEnv:
    """A virtual environment without pip of its own; this interpreter's pip works on it."""

    def __init__(self, folder: Path) -> None:
        done = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        assert done.returncode == 0, done.stdout
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python3.*")) / "site-packages"

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run pip on the environment, without an index."""
        return run(
            sys.executable, "-m", "pip", "--python", self.python, *arguments,
            cwd=self.site, PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1",
        )  # fmt: skip

    def install(self, *arguments: str | Path) -> None:
        """``pip install`` of packages whose dependencies are there."""
        done = self.pip("install", "--no-deps", "--no-build-isolation", *arguments)
        assert done.returncode == 0, done.stdout

    def link(self, *names: str) -> None:
        """Link entries of this interpreter's site-packages into the environment's."""
        for name in names:
            (self.site / name).symlink_to(SITE / name)

    def link_setuptools(self) -> None:
        """Let the environment build packages, without seeing anything else of this one."""
        info = f"setuptools-{metadata.version('setuptools')}.dist-info"
        self.link("setuptools", info, "_distutils_hack", "distutils-precedence.pth")

    def link_vllm(self) -> None:
        """Give the environment upstream's vLLM as an installer would have laid it out.

        ``site-packages/vllm`` is a folder of the environment's own, with a link for each entry, so
        that an overlay can be installed into it. All other packages come through a ``.pth``.
        """
        upstream = self.site / "vllm"
        upstream.mkdir()
        for entry in (SITE / "vllm").iterdir():
            if entry.name not in ("vit_cudagraph", "__pycache__"):
                (upstream / entry.name).symlink_to(entry)
        self.link(*(info.name for info in SITE.glob("vllm*.dist-info") if "vit" not in info.name))
        (self.site / "others.pth").write_text(f"{SITE}\n")

    def listing(self) -> set[str]:
        """Every path of site-packages, links not followed, bytecode left out."""
        found = set()
        for folder, folders, files in os.walk(self.site):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found.update(os.path.relpath(Path(folder, name), self.site) for name in folders + files)
        return found


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str | bytes],
    requires: Sequence[str] = (),
) -> Path:
    """Write a pure wheel with ``files`` (path -> content), as an index would offer it."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    texts: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents = {k: v if isinstance(v, bytes) else v.encode() for k, v in texts.items()}
    record = ""
    for path, data in contents.items():
        digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


def pack_installed(folder: Path, name: str) -> Path:
    """Write a wheel of a pure package that is installed here, with its real content."""
    dist = metadata.distribution(name)
    files = {
        str(file): file.locate().read_bytes()
        for file in dist.files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts
        and not file.parts[0].endswith(".dist-info")
    }  # fmt: skip
    entry_points = dist.read_text("entry_points.txt")
    if entry_points is not None:
        info = f"{name.replace('-', '_')}-{dist.version}.dist-info"
        files[f"{info}/entry_points.txt"] = entry_points.encode()
    return write_wheel(folder, name, dist.version, files)
