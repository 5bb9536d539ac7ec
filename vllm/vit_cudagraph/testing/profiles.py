# SPDX-License-Identifier: Apache-2.0
"""How many examples the properties run: profiles of hypothesis.

| Profile | Examples of a property | For |
|---|---|---|
| ``dev`` | at most 10 | a run beside the editor; the default |
| ``ci`` | what the property asks for, the same ones in every run | continuous integration |
| ``nightly`` | at least 5,000, new ones in every run | ``make fuzz`` |
| ``gpu`` | ``VIT_CUDAGRAPH_EXAMPLES`` (40), the same ones in every run | scarce time on a GPU |

A ``conftest.py`` calls :func:`load` before test modules are imported. A property then says
``@examples(40)`` where it would have said ``@settings(max_examples=40)``, which would hold in every
profile. A suite that loads another profile, or none, gets the number that the property asks for.

This module imports nothing but hypothesis (and, being part of the package, ``vllm`` itself).
"""

import os

from hypothesis import HealthCheck, Phase, settings

NAMES = ("dev", "ci", "nightly", "gpu")
NIGHTLY_EXAMPLES = 5000
_CI_EXAMPLES, _DEV_EXAMPLES, _GPU_EXAMPLES = 25, 10, 40

# A property that a base class defines runs for each class that inherits it, each with its own self:
# that is what the base class is for.
_INHERITED = (HealthCheck.differing_executors,)
# An example may be a whole tower, and its batch a long list. Too many rejected examples
# (filter_too_much) stay an error: they would mean that 5,000 examples are fewer.
_LONG_RUN = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def _gpu_examples() -> int:
    """``VIT_CUDAGRAPH_EXAMPLES``, or its default; ``ValueError`` unless a positive whole number."""
    text = os.environ.get("VIT_CUDAGRAPH_EXAMPLES", str(_GPU_EXAMPLES))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"VIT_CUDAGRAPH_EXAMPLES={text!r} is no number of examples; "
            f"set it to a positive whole number, for example {_GPU_EXAMPLES}"
        )
    return int(text)


def register_profiles() -> None:
    """Register the profiles ``dev``, ``ci``, ``nightly`` and ``gpu`` with hypothesis."""
    always = settings(
        settings.get_profile("default"),
        deadline=None,
        print_blob=True,
        stateful_step_count=20,
        suppress_health_check=_INHERITED,
    )
    slow = (*_INHERITED, *_LONG_RUN)
    register = settings.register_profile
    register("dev", always, max_examples=_DEV_EXAMPLES)
    register(
        "ci",
        always,
        max_examples=_CI_EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=slow,
    )
    register(
        "nightly",
        always,
        max_examples=NIGHTLY_EXAMPLES,
        derandomize=False,
        stateful_step_count=30,
        suppress_health_check=slow,
    )
    register(
        "gpu",
        always,
        max_examples=_gpu_examples(),
        derandomize=True,
        database=None,
        # A failure is shrunk on the twin, if it shows there; on a GPU it is reported as drawn.
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=slow,
    )


def load(name: str | None = None) -> str:
    """Register the profiles and load one; returns its name.

    ``name`` defaults to the variable ``HYPOTHESIS_PROFILE``, and that to ``dev``. ``ValueError``
    for a name that is not in ``NAMES``.
    """
    chosen = name or os.environ.get("HYPOTHESIS_PROFILE") or "dev"
    if chosen not in NAMES:
        raise ValueError(
            f"no profile {chosen!r}; set HYPOTHESIS_PROFILE to one of {', '.join(NAMES)}"
        )
    register_profiles()
    settings.load_profile(chosen)
    return chosen


def examples(ci: int) -> settings:
    """Settings for a property that is worth ``ci`` examples in continuous integration.

    A decorator, or the ``settings`` of a state machine's ``TestCase``. It takes the profile that is
    loaded when it is called: ``ci`` examples under ``ci``, ``min(10, ci)`` under ``dev``, at least
    5,000 under ``nightly``, ``VIT_CUDAGRAPH_EXAMPLES`` under ``gpu``, ``ci`` under any other.
    """
    numbers = {
        "dev": min(_DEV_EXAMPLES, ci),
        "nightly": max(NIGHTLY_EXAMPLES, ci),
        "gpu": settings().max_examples,
    }
    suppressed = {*settings().suppress_health_check, *_INHERITED}
    # pytest's --hypothesis-verbosity loads "ci-with-verbose-verbosity".
    profile = settings.get_current_profile_name().partition("-with-")[0]
    return settings(
        max_examples=numbers.get(profile, ci),
        suppress_health_check=tuple(suppressed),
    )
