# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the cost model's tests: engines whose ranks find different profiles, or none."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from pathlib import Path

import deepspeed
import numpy as np
import torch.distributed as dist

import deepspeed_distca
from deepspeed_distca.attention_server.coordination.agreement import AgreementError
from tests.distributed.engine_worker import VOCABULARY, ds_config, tiny_llama


def start(caches: list[str], block: dict, lengths: list[list[int]] | None = None) -> dict:
    """An engine, and one step of it where lengths of documents are given by rank.

    Returns:
        the cost model's terms, what was printed and logged, the step's predicted loads and bytes; or the error.
    """
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    os.environ["XDG_CACHE_HOME"] = caches[rank]
    logged, printed = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("deepspeed_distca").addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed):
            engine = deepspeed.initialize(
                model=tiny_llama(), config=ds_config(0, 1, {"advanced": {"granularity": 16}, **block})
            )[0]
    except (deepspeed_distca.DistCAConfigError, AgreementError) as error:
        return {"error": str(error)}
    outcome = {
        "terms": list(engine.distca.server._cost.terms),
        "printed": next((line for line in printed.getvalue().splitlines() if line.startswith("distca: ")), ""),
        "logged": logged.getvalue(),
    }
    if lengths is not None:
        rng = np.random.default_rng(rank)
        features = [{"input_ids": rng.integers(0, VOCABULARY, size=n)} for n in lengths[rank]]
        engine.train()
        engine.backward(engine(**deepspeed_distca.PackedSequenceCollator()(features)).loss)
        stats = engine.distca.stats
        outcome |= {"loads": stats.predicted_server_seconds, "bytes_moved": stats.bytes_moved}
    return outcome


def cache_file(cache: str | Path, name: str) -> Path:
    """Where a profile of that name lies in a user's cache."""
    return Path(cache, "deepspeed_distca", name)
