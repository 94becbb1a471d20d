# SPDX-License-Identifier: Apache-2.0
"""Every family of decoders, exact or refused by name; and the table in the docs says what was found here."""

from __future__ import annotations

import pytest

from tests.distributed import model_families, models_table


@pytest.fixture(scope="module")
def found():
    return models_table.measure()


def test_every_family_is_exact(found):
    failed = [
        r
        for r in found["exact"]
        if "error" in r or not max(r["loss_error"], r["gradient_error"]) <= models_table.BOUND
    ]
    assert not failed
    assert [r["name"] for r in found["exact"]] == list(model_families.EXACT)


def test_attention_was_moved_in_every_family(found):
    assert all(r["bytes_moved"] > 0 for r in found["exact"])


def test_what_only_shows_while_running_is_refused_on_every_rank(found):
    for refused in found["refused"]:
        for name, (_, _, reason) in model_families.REFUSED_RUNNING.items():
            assert reason in refused[name], (name, refused[name])


@pytest.mark.parametrize("name", model_families.REFUSED)
def test_refused_by_name_before_the_first_step(name):
    from deepspeed_distca.integrations.transformers import UnsupportedModelError, attention_modules

    model_type, options, reason = model_families.REFUSED[name]
    model = model_families.build(model_type, options)
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        attention_modules(model)
    assert type(model).__name__ in str(error.value)


def test_the_table_in_the_docs_is_what_was_found(found):
    expected = models_table.page(found["exact"], {**models_table.refused_at_once(), **found["refused"][0]})
    assert models_table.PAGE.read_text() == expected, "run: python -m tests.distributed.models_table"
