# SPDX-License-Identifier: Apache-2.0
"""Core attention over real process groups: any partition of the work gives what each document alone gives."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_plans_are_exact_in_fp32(world: int) -> None:
    errors = run_ranks("tests.distributed.core_attention_worker:check", world, seed=world, cases=60)
    for worst in errors:
        assert max(worst.values()) < 1e-5, errors


def test_bf16_accumulates_key_gradients_in_fp32() -> None:
    # bf16 inputs, compared with float64 on the same inputs. dv is rounded once, however many servers contribute; dq and
    # dk also carry the rounding of out through delta, as they do in any flash-attention.
    errors = run_ranks("tests.distributed.core_attention_worker:check", 3, seed=7, cases=40, dtype="bfloat16")
    for worst in errors:
        assert worst["lse"] < 1e-5 and max(worst["out"], worst["dv"]) < 4e-3, errors
        assert max(worst["dq"], worst["dk"]) < 1e-2, errors
