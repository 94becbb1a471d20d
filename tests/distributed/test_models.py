# SPDX-License-Identifier: Apache-2.0
"""Every decoder that transformers has is exact or refused by name, and the page in the docs says what was found."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import transformers

from tests.distributed import model_families, models_table


@pytest.fixture(scope="module")
def measure() -> Callable[[int], list[dict]]:
    """Each part is measured once."""
    return functools.cache(models_table.measure)


@pytest.mark.parametrize("part", range(models_table.PARTS))
def test_every_decoder_is_exact_or_refused_by_name(measure, part: int) -> None:
    found = measure(part)
    assert [result["name"] for result in found] == models_table.part_names(part)
    faults = [fault for fault in map(models_table.fault, found) if fault]
    assert not faults, "\n".join(faults)


def test_no_model_is_left_out() -> None:
    parts = [name for part in range(models_table.PARTS) for name in models_table.part_names(part)]
    assert parts == list(model_families.ALL)
    assert set(model_families.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(parts)


def test_the_page_says_what_was_found(measure) -> None:
    text = models_table.PAGE.read_text()
    version = ".".join(transformers.__version__.split(".")[:2])
    if f"transformers {version}" not in text:
        pytest.skip(f"docs/models.md is of another version of transformers than {version}")
    everything = [found for part in range(models_table.PARTS) for found in measure(part)]
    assert text == models_table.page(everything), "run: python -m tests.distributed.models_table"
