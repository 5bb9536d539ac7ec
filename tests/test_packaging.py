# SPDX-License-Identifier: Apache-2.0
"""What a user installs: a wheel, a source tree, an editable checkout, each beside upstream's vLLM.

Builds start from a copy of the sources and go to environments made for one test.
"""

import importlib.util
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from scratch_env import ROOT, SITE, ScratchEnv, copy_sources, run, write_wheel

import vllm.vit_cudagraph

REPORT = """
import importlib.metadata, json
import vllm.vit_cudagraph
[point] = importlib.metadata.entry_points(group="vllm.general_plugins", name="vit_cudagraph")
print(json.dumps([
    vllm.__file__,
    vllm.vit_cudagraph.__file__,
    point.load().__code__.co_filename,
    str(point.dist.locate_file("")),
]))
"""
USE_FAKE = "import vllm.engine, vllm.vit_cudagraph as o; print(vllm.LLM, vllm.__file__, o.__file__)"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("build") / "sources")


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """The wheel, built as `pip install .` builds it."""
    folder = sources.parent / "wheels"
    done = build(sources, folder)
    assert done.returncode == 0, done.stdout
    [built] = folder.glob("*.whl")
    return built


def build(sources: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a wheel of ``sources`` into ``folder`` with this interpreter's setuptools."""
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    return run(*pip, "-w", folder, sources, cwd=sources.parent)


@pytest.fixture
def env(tmp_path: Path) -> ScratchEnv:
    return ScratchEnv(tmp_path / "env")


@pytest.fixture
def fake_upstream(tmp_path: Path) -> Path:
    """The source tree of a package `vllm`, small enough to be installed in editable mode."""
    folder = tmp_path / "upstream"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("LLM = object\n")
    (folder / "vllm" / "engine.py").write_text("")
    (folder / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'vllm'\nversion = '0.32.0'\n"
        "[tool.setuptools.packages.find]\ninclude = ['vllm*']\n"
    )
    return folder


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overlay_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_version_is_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == vllm.vit_cudagraph.__version__


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"vllm_vit_cudagraph-{vllm.vit_cudagraph.__version__}.dist-info/"
    ours = {name for name in names if not name.startswith(info)}
    package = ROOT / "vllm" / "vit_cudagraph"
    expected = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert ours == expected | {"vllm/vit_cudagraph/py.typed"}
    assert {f"{info}licenses/LICENSE", f"{info}entry_points.txt"} <= names


def test_wheel_beside_the_real_upstream(
    env: ScratchEnv, sources: Path, wheel: Path, tmp_path: Path
) -> None:
    """Install, use from any working directory, a checkout's included, uninstall."""
    env.link_vllm()
    before, upstream_before = env.listing(), sorted(SITE.joinpath("vllm").rglob("*.py"))
    env.install(wheel)
    package = env.site / "vllm"
    files = ["__init__.py", "vit_cudagraph/__init__.py", "vit_cudagraph/plugin.py"]
    for cwd in (tmp_path, sources):
        done = run(env.python, "-c", REPORT, cwd=cwd)
        assert done.returncode == 0, f"in {cwd}:\n{done.stdout}"
        report = list(map(Path, json.loads(done.stdout.splitlines()[-1])))
        assert report == [*(package / file for file in files), env.site], f"in {cwd}"

    # `python -m pytest` puts the checkout, with its `vllm/`, first on sys.path.
    test = tmp_path / "test_here.py"
    test.write_text(
        "import sys\n"
        "import vllm.vit_cudagraph\n"
        "def test_here():\n"
        f"    assert {str(ROOT)!r} in sys.path\n"
        f"    assert vllm.vit_cudagraph.__file__ == {str(package / files[1])!r}\n"
    )
    flags = ("-q", "--noconftest", "-c", "/dev/null", "-p", "no:cacheprovider")
    done = run(env.python, "-m", "pytest", *flags, test, cwd=ROOT)
    assert "1 passed" in done.stdout

    done = env.pip("uninstall", "--yes", "vllm-vit-cudagraph")
    assert done.returncode == 0, done.stdout
    assert env.listing() == before
    assert sorted(SITE.joinpath("vllm").rglob("*.py")) == upstream_before


@pytest.mark.parametrize(
    ("upstream", "ours"),
    [
        ("regular", "regular"),
        ("regular", "editable"),
        ("editable_mode=lenient", "editable"),
        ("editable_mode=compat", "editable"),
    ],
)
def test_source_installs(
    upstream: str, ours: str, env: ScratchEnv, sources: Path, fake_upstream: Path, tmp_path: Path
) -> None:
    """`pip install .` and `pip install -e .`, the latter beside an editable upstream too.

    setuptools has two ways to install upstream from its sources: a finder, and a path.
    """
    env.link_setuptools()
    start = env.listing()
    editable = ["--config-settings", upstream, "-e"] if upstream != "regular" else []
    env.install(*editable, fake_upstream)
    before = env.listing()
    env.install(*(["-e"] if ours == "editable" else []), sources)

    init = "vllm/__init__.py"
    vllm_file = (fake_upstream if editable else env.site) / init
    overlay = (sources if ours == "editable" else env.site) / "vllm/vit_cudagraph/__init__.py"
    for cwd in (tmp_path, sources, ROOT):
        done = run(env.python, "-c", USE_FAKE, cwd=cwd)
        assert done.stdout.strip() == f"<class 'object'> {vllm_file} {overlay}", f"in {cwd}"

    done = env.pip("uninstall", "--yes", "vllm-vit-cudagraph")
    assert done.returncode == 0, done.stdout
    assert env.listing() == before != start


def test_wheel_over_an_editable_upstream_names_the_step(
    env: ScratchEnv, wheel: Path, fake_upstream: Path, tmp_path: Path
) -> None:
    env.link_setuptools()
    env.install("-e", fake_upstream)
    env.install(wheel)
    done = run(env.python, "-c", "import vllm.vit_cudagraph", cwd=tmp_path)
    assert done.returncode != 0
    message = done.stdout.splitlines()[-1]
    assert message.startswith("ImportError: the directory ")
    assert str(env.site / "vllm") in message
    assert "vllm 0.32.0" in message
    assert "pip install -e" in message


def test_without_upstream_the_import_says_so(env: ScratchEnv, wheel: Path, tmp_path: Path) -> None:
    env.install(wheel)
    done = run(env.python, "-c", "import vllm.vit_cudagraph", cwd=tmp_path)
    assert done.returncode != 0
    message = done.stdout.splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert "vLLM is not installed" in message
    assert "pip install 'vllm>=0.32,<0.34'" in message


@pytest.mark.parametrize(
    ("file", "owned", "says"),
    [
        ("vllm/__init__.py", {}, "may only hold files below vllm/vit_cudagraph/"),
        ("vllm/config.py", {}, "may only hold files below vllm/vit_cudagraph/"),
        ("vllm/vit_cudagraph.py", {}, "may only hold files below vllm/vit_cudagraph/"),
        ("other/module.py", {}, "may only hold files below vllm/vit_cudagraph/"),
        (
            "vllm/vit_cudagraph/mixin.py",
            {"vllm/vit_cudagraph/mixin.py": "vllm"},
            "belongs to the installed vllm",
        ),
    ],
)
def test_guard_refuses(setup_py: ModuleType, file: str, owned: dict[str, str], says: str) -> None:
    with pytest.raises(setup_py.SetupError, match=says) as refusal:
        setup_py.check_overlay(["vllm/vit_cudagraph/geometry.py", file], owned)
    assert file in str(refusal.value)


def test_guard_knows_what_the_installed_upstream_owns(setup_py: ModuleType) -> None:
    owned = setup_py.upstream_files()
    assert "vllm/__init__.py" in owned
    assert not any(path.startswith("vllm/vit_cudagraph/") for path in owned)


@pytest.mark.parametrize("editable", [False, True])
def test_no_build_with_an_init_beside_the_overlay(
    editable: bool, env: ScratchEnv, tmp_path: Path
) -> None:
    sources = copy_sources(tmp_path / "sources")
    (sources / "vllm" / "__init__.py").touch()
    env.link_setuptools()
    flags = ["-e"] if editable else []
    done = env.pip("install", "--no-deps", "--no-build-isolation", *flags, sources)
    assert done.returncode != 0
    assert f"{sources}/vllm/__init__.py must not exist" in done.stdout


@pytest.mark.parametrize("editable", [False, True])
def test_no_install_beside_an_upstream_that_brings_the_package(
    editable: bool, env: ScratchEnv, sources: Path, tmp_path: Path
) -> None:
    files = {"vllm/__init__.py": "", "vllm/vit_cudagraph/__init__.py": ""}
    env.link_setuptools()
    env.install(write_wheel(tmp_path, "vllm", "0.99.0", files))
    flags = ["-e"] if editable else []
    done = env.pip("install", "--no-deps", "--no-build-isolation", *flags, sources)
    assert done.returncode != 0
    assert "vllm/vit_cudagraph/__init__.py belongs to the installed vllm" in done.stdout


def test_left_overs_of_an_older_build(tmp_path: Path) -> None:
    """A module that is gone stays out of the wheel; one on upstream's path stops the build."""
    sources = copy_sources(tmp_path / "sources")
    old = sources / "build" / "lib" / "vllm"
    (old / "vit_cudagraph").mkdir(parents=True)
    (old / "vit_cudagraph" / "gone.py").touch()
    assert build(sources, tmp_path).returncode == 0
    [built] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        assert "vllm/vit_cudagraph/gone.py" not in archive.namelist()

    (old / "config.py").touch()
    done = build(sources, tmp_path)
    assert done.returncode != 0
    assert "vllm/config.py is not" in done.stdout
