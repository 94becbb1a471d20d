# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_server_weights.py: a step of engines whose devices' speeds are measured, or made up."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca import DistCAConfigError, Layout
from deepspeed_distca.attention_server.agreement import AgreementError
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.profiling import speeds
from tests.distributed.engine_worker import backward, documents_of, ds_config, reference, tiny_llama


def run(lengths: list[list[int]], fabricated: list[float], pinned: list[int]) -> dict:
    """One step each without weights, with measured ones, with measured ones of made-up speeds (one for each rank),
    and with given ones; the errors where a rank cannot be measured, and how often this one was for an error and two
    engines after it."""
    deepspeed.init_distributed("gloo")
    layout = Layout.from_lengths(lengths)
    outcomes = {"plain": _step(layout, {})}
    for name in ("measured", "again"):
        outcomes[name] = _step(layout, {"server_weights": "measured"})
    mine = fabricated[dist.get_rank()]
    with _measuring(lambda device: mine):
        outcomes["fabricated"] = _step(layout, {"server_weights": "measured"})
    outcomes["pinned"] = _step(layout, {"server_weights": pinned})
    return {
        "steps": outcomes,
        "full": _failing_on_rank_1(torch.cuda.OutOfMemoryError("CUDA out of memory.")),
        "cublas": _failing_on_rank_1(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED\nwhen calling")),
        "different": _asked_for_by_rank_0_alone(),
    }


@contextlib.contextmanager
def _measuring(device_speed: Callable[[torch.device], float]) -> Iterator[None]:
    """Speeds are measured anew, by this."""
    with mock.patch.object(speeds, "device_speed", device_speed), mock.patch.object(speeds, "_KEPT", {}):
        yield


def _failing_on_rank_1(error: RuntimeError) -> dict:
    """What an engine says whose rank 1 cannot be measured, and how often this rank has been measured after that, after
    another try that succeeds, and after the next engine."""
    effects = [error if dist.get_rank() == 1 else 1.0, 2.0, 3.0]
    measured, device = mock.Mock(side_effect=effects), torch.device("cpu")
    with _measuring(measured):
        said, counts = _refusal("measured"), [measured.call_count]
        for _ in range(2):
            assert speeds.speeds_of_ranks(device) == [2.0, 2.0]
            counts.append(measured.call_count)
    return {"said": said, "counts": counts}


def _asked_for_by_rank_0_alone() -> str:
    return _refusal([1, 2] if dist.get_rank() else "measured")


def _refusal(weights: list[int] | str) -> str:
    """What `deepspeed.initialize` complains of."""
    try:
        deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 1, {"server_weights": weights}))
    except (DistCAConfigError, AgreementError) as error:
        return str(error)
    return ""


def _step(layout: Layout, block: dict) -> dict:
    documents = documents_of(layout, np.random.default_rng(0))
    expected_loss, expected = reference(tiny_llama(), [documents])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 1, {"granularity": 4, **block}))[0]
    outcome = backward(engine, batch_from_layout(documents, layout, dist.get_rank()), expected_loss, expected)
    return {
        **outcome,
        "weights": engine.distca.server_weights,
        "printed": [line for line in printed.getvalue().splitlines() if "speeds" in line],
        "loads": engine.distca.stats.predicted_server_seconds,
        "bytes_moved": engine.distca.stats.bytes_moved,
    }
