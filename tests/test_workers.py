# SPDX-License-Identifier: Apache-2.0
"""``make test`` gives files to two workers; those that start servers all go to one."""

from pathlib import Path

import conftest

HERE = Path(__file__).parent


def test_every_file_that_starts_servers_is_named() -> None:
    marked = {
        f"tests/{file.name}"
        for file in HERE.glob("test_*.py")
        if "pytest.mark.serve" in file.read_text() and file != Path(__file__)
    }
    assert marked == set(conftest._SERVERS)


def test_files_stay_whole_and_servers_stay_together() -> None:
    split = conftest.scope_of
    assert split("tests/test_serve.py::test_a[x::y]") == split("tests/test_examples.py::test_b")
    assert split("tests/test_geometry.py::test_a") == split("tests/test_geometry.py::C::test_b")
    assert split("tests/test_geometry.py::test_a") != split("tests/test_metadata.py::test_a")
