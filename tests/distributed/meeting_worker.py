# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_meeting.py: engines that get the plugin, lose it and get it again; micro-batches that
some ranks leave; ranks that are given the same tokens."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

import deepspeed_distca
from deepspeed_distca.attention_server.coordination.agreement import Agreement
from tests.distributed.engine_worker import VOCABULARY, ds_config, tiny_llama

BLOCK = {"advanced": {"granularity": 16}}


def run() -> dict:
    deepspeed.init_distributed("gloo")
    return {
        "anew": _anew(),
        "left": _left(),
        "refused": _refused(),
        "same tokens": _same_tokens(),
        "kernel": _kernel(),
    }


def _engine(block: dict | None = BLOCK):
    engine = deepspeed.initialize(model=tiny_llama(), config=ds_config(0, 1, block))[0]
    engine.train()
    return engine


def _batch(*lengths: int, seed: int | None = None) -> dict:
    rng = np.random.default_rng(dist.get_rank() if seed is None else seed)
    features = [{"input_ids": rng.integers(0, VOCABULARY, size=n)} for n in lengths]
    return deepspeed_distca.PackedSequenceCollator()(features)


def _step(engine) -> float:
    loss = engine(**_batch(*([200] if dist.get_rank() == 0 else [9, 4]))).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _message_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _anew() -> dict:
    """The plugin is attached to an engine without a block, twice, taken off and attached again."""
    engine, found = _engine(None), {}
    found["without a block"] = hasattr(engine, "distca")
    deepspeed_distca.attach(engine, BLOCK)
    first = engine.distca
    _step(engine)
    found["moved"] = [first.stats.bytes_moved > 0]
    found["again"] = deepspeed_distca.attach(engine) is engine and engine.distca is first
    found["other options"] = _message_of(
        lambda: deepspeed_distca.attach(engine, {"advanced": {"granularity": 16, "tolerance": 0.5}})
    )
    wrapped = {"backward", "step"} & set(vars(engine))
    first.detach()
    first.detach()
    found["wrapped"] = sorted(wrapped), sorted({"backward", "step"} & set(vars(engine)))
    _step(engine)
    found["out of use"] = first.server.stats.micro_batches  # of its last step
    deepspeed_distca.attach(engine, BLOCK)
    _step(engine)
    found["moved"].append(engine.distca is not first and engine.distca.stats.bytes_moved > 0)
    return found


def _left() -> dict:
    """Rank 1 fails before its first attention layer, both ranks catch what they get, and go on."""
    engine = _engine()
    _step(engine)
    fault = mock.Mock(side_effect=ValueError("a made-up fault"))
    handle = engine.module.model.layers[0].register_forward_pre_hook(lambda *_: fault())
    if dist.get_rank() == 0:
        handle.remove()
    begin = time.monotonic()
    said = _message_of(lambda: _step(engine))
    seconds = time.monotonic() - begin
    handle.remove()
    return {"said": said, "seconds": seconds, "after it": [_step(engine) for _ in range(2)]}


def _refused() -> dict:
    """Rank 1 fails after its plan was made: this engine is of no use any more, until the plugin is attached anew."""
    engine = _engine()
    fault = mock.Mock(side_effect=ValueError("a made-up fault"))
    if dist.get_rank() == 1:
        engine.module.model.layers[1].register_forward_pre_hook(lambda *_: fault() if fault.side_effect else None)
    said = [_message_of(lambda: _step(engine)) for _ in range(2)]
    fault.side_effect = None
    engine.distca.detach()
    deepspeed_distca.attach(engine, BLOCK)
    return {"said": said, "after it": _step(engine)}


@contextlib.contextmanager
def _logged() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("deepspeed_distca").addHandler(handler)
    try:
        yield text
    finally:
        logging.getLogger("deepspeed_distca").removeHandler(handler)


def _same_tokens() -> list[int]:
    """How often this rank warns of the same tokens on all ranks: where they differ, and where they do not."""
    counts = []
    for seed in (None, 5):
        engine = _engine()
        with _logged() as text:
            for _ in range(3):
                engine.backward(engine(**_batch(20, 7, seed=seed)).loss)
        counts.append(text.getvalue().count("the very same tokens"))
    return counts


def _kernel() -> str:
    """Rank 1 alone fails in what every rank does by itself while the plugin is attached."""
    everyone = Agreement.all_or_none

    def build() -> None:
        engine = _engine()
        with everyone(engine.distca._everyone, "be tried out"):
            if dist.get_rank() == 1:
                raise torch.OutOfMemoryError("no memory")

    return _message_of(build)
