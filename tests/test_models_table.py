# SPDX-License-Identifier: Apache-2.0
"""`docs/models.md` is what its command makes of the code and the committed results."""

import pytest
from tools import models_table
from tools.count_hooks import family_files

from vllm.vit_cudagraph.registration import MODELS


def test_the_page_is_up_to_date() -> None:
    made = models_table.page()
    assert made == models_table.PAGE.read_text(), (
        "run: python tests/tools/models_table.py > docs/models.md"
    )
    for name in MODELS:
        assert f"`{name}`" in made


@pytest.mark.parametrize("family", [path.stem for path in family_files()])
def test_every_family_has_been_tested(family: str) -> None:
    tested = models_table.of_family(family)
    assert tested, "see tests/tools/conformance_json.py"
    assert all(not result["counts"].get("failed") for result in tested.values())
    assert "?" not in models_table.row(family)


def test_upstreams_lines_are_counted_once() -> None:
    dense, metadata = models_table.upstream_lines("qwen2_5_vl")
    assert 100 < len(dense) < 400 and 10 < len(metadata) < 200
    assert all(path.name == "qwen2_5_vl.py" for path, _ in dense | metadata)
