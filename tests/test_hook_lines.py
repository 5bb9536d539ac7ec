# SPDX-License-Identifier: Apache-2.0
"""A model's hooks stay small, and the counter that says so cannot be talked round."""

from pathlib import Path
from textwrap import dedent

from tools.count_hooks import MODELS, above, family_files, hook_lines


def count(folder: Path, **files: str) -> dict[str, int]:
    """Write ``files`` and count the one called ``family``."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(dedent(text))
    return hook_lines(folder / "family.py")


def test_every_family_stays_within_the_limit() -> None:
    counts = {path.stem: hook_lines(path) for path in family_files()}
    assert counts, f"no model in {MODELS}"
    assert all(counts.values()), f"a family file without a class: {counts}"
    lines = {(family, name): n for family, classes in counts.items() for name, n in classes.items()}
    assert not above(lines)


def test_what_is_not_counted(tmp_path: Path) -> None:
    family = '''
        """Module text."""

        from somewhere import Base


        class Model(
            Base,
        ):
            """Class text,
            of two lines."""

            # a comment
            size = 1  # counted once

            def hook(self):
                """Text."""
                import math

                return math.sqrt(
                    self.size
                )
        '''
    assert count(tmp_path, family=family) == {"Model": 5}


def test_helpers_count_for_the_classes_that_use_them(tmp_path: Path) -> None:
    family = """
        TABLE = (1,
                 2)

        def first():
            return second()

        def second():
            return TABLE

        def other():
            return 0

        class _Shared:
            a = 1

        class One(_Shared):
            b = first()

        class Two(_Shared):
            b = other()
        """
    assert count(tmp_path, family=family) == {"One": 1 + 1 + 2 + 2 + 2, "Two": 1 + 1 + 2}


def test_a_helper_nobody_uses_and_loose_statements_count_for_all(tmp_path: Path) -> None:
    family = """
        def forgotten():
            return 1

        class Model:
            pass

        Model.hook = lambda self: 3
        """
    assert count(tmp_path, family=family) == {"Model": 4}


def test_a_private_module_is_shared_only_if_another_family_uses_it(tmp_path: Path) -> None:
    helpers = """
        def wide():
            return narrow()

        def narrow():
            return 1
        """
    family = """
        from vllm.vit_cudagraph.models._helpers import narrow, wide as broad

        class Model:
            hook = broad
            other = narrow
        """
    assert count(tmp_path, _helpers=helpers, family=family) == {"Model": 6}
    neighbour = """
        from vllm.vit_cudagraph.models._helpers import narrow

        class Neighbour:
            hook = narrow
        """
    assert count(tmp_path, _helpers=helpers, family=family, neighbour=neighbour) == {"Model": 4}
