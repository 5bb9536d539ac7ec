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
from scratch_env import ROOT, SITE, ScratchEnv, clean_environ, copy_sources, run, write_wheel

import vllm.vit_cudagraph

REPORT = """
import importlib.metadata, json
import vllm.vit_cudagraph, vllm.version
points = importlib.metadata.entry_points(group="vllm.general_plugins", name="vit_cudagraph")
[point] = points
print(json.dumps({
    "overlay": vllm.vit_cudagraph.__file__,
    "upstream": vllm.__file__,
    "distribution": str(point.dist.locate_file("")),
    "register": point.load().__code__.co_filename,
}))
"""


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


@pytest.mark.parametrize("how", ["wheel", "source", "editable"])
def test_install_use_uninstall(
    how: str, env: ScratchEnv, sources: Path, wheel: Path, tmp_path: Path
) -> None:
    """From any working directory `vllm` is upstream's and the overlay is the one installed."""
    env.link_vllm()
    before, upstream_before = env.listing(), sorted(SITE.joinpath("vllm").rglob("*.py"))
    env.install(*{"wheel": [wheel], "source": [sources], "editable": ["-e", sources]}[how])

    home = sources if how == "editable" else env.site
    folders = (tmp_path, sources, ROOT) if how == "wheel" else (sources, ROOT)
    command = [str(env.python), "-c", REPORT]
    started = [
        subprocess.Popen(
            command, cwd=cwd, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for cwd in folders
    ]
    for cwd, process in zip(folders, started, strict=True):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, f"in {cwd}:\n{errors.decode()}"
        report = {k: Path(v) for k, v in json.loads(output.splitlines()[-1]).items()}
        assert report == {
            "overlay": home / "vllm/vit_cudagraph/__init__.py",
            "upstream": env.site / "vllm/__init__.py",
            "register": home / "vllm/vit_cudagraph/plugin.py",
            # An editable build leaves an egg-info in its tree: from there, Python finds that first.
            "distribution": cwd if how == "editable" and cwd == sources else env.site,
        }, f"in {cwd}"

    done = env.pip("uninstall", "--yes", "vllm-vit-cudagraph")
    assert done.returncode == 0, done.stdout
    assert env.listing() == before
    assert sorted(SITE.joinpath("vllm").rglob("*.py")) == upstream_before


def test_pytest_from_a_checkout_uses_the_installed_wheel(
    env: ScratchEnv, sources: Path, wheel: Path, tmp_path: Path
) -> None:
    """`python -m pytest` puts the checkout, with its `vllm/`, first on sys.path."""
    env.link_vllm()
    env.install(wheel)
    test = tmp_path / "test_here.py"
    test.write_text(
        "import sys\n"
        "def test_here():\n"
        f"    assert sys.path.count({str(sources)!r})\n"
        "    import vllm.vit_cudagraph\n"
        f"    assert vllm.vit_cudagraph.__file__.startswith({str(env.site)!r})\n"
    )
    done = run(env.python, "-m", "pytest", "-q", "--noconftest", "-c", "/dev/null", test,
               cwd=sources)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("mode", ["lenient", "compat"])
def test_editable_beside_an_editable_upstream(
    mode: str, env: ScratchEnv, sources: Path, fake_upstream: Path, tmp_path: Path
) -> None:
    """Both of setuptools' ways (a finder, a path) to install upstream from its sources work."""
    env.link_setuptools()
    env.install("-e", fake_upstream, "--config-settings", f"editable_mode={mode}")
    env.install("-e", sources)
    code = "import vllm.engine, vllm.vit_cudagraph as o; print(vllm.LLM, vllm.__file__, o.__file__)"
    for cwd in (tmp_path, sources, ROOT, fake_upstream):
        done = run(env.python, "-c", code, cwd=cwd)
        overlay = sources / "vllm/vit_cudagraph/__init__.py"
        expected = f"<class 'object'> {fake_upstream / 'vllm/__init__.py'} {overlay}"
        assert done.stdout.strip() == expected, f"in {cwd}"


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
