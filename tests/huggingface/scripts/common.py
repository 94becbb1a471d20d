# SPDX-License-Identifier: Apache-2.0
"""What the training scripts of the launcher tests share: the same rows in the same order, model and configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ACCUMULATION, RANKS = 20, 4, 2
LEARNING_RATE = 2e-3
VOCABULARY = 97


def rows(count: int = STEPS * ACCUMULATION * RANKS, seed: int = 0) -> list[list[list[int]]]:
    """Packed rows of one to five documents, of very different numbers of tokens."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 40, size=rng.integers(1, 6)) for _ in range(count)]
    # A stretch that counts upwards, so that there is something to learn.
    return [[((rng.integers(VOCABULARY) + np.arange(n)) % VOCABULARY).tolist() for n in row] for row in lengths]


def features(count: int = STEPS * ACCUMULATION * RANKS, seed: int = 0) -> list[dict[str, list[int]]]:
    """The same rows, flattened: documents told apart by position ids."""
    return [
        {"input_ids": [t for d in row for t in d], "position_ids": [p for d in row for p in range(len(d))]}
        for row in rows(count, seed)
    ]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            use_cache=False,
        )
    )


def config(zero: int = 1, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.0,
                "torch_adam": True,
            },
        },
        "steps_per_print": 10**9,
        "distca": {"enabled": True, "advanced": {"granularity": 8, "tolerance": 0.0}},
        **more,
    }


def report(values: dict) -> None:
    """Rank 0 writes what the test reads."""
    if int(os.environ["RANK"]) == 0:
        Path(os.environ["TEST_OUTPUT"]).write_text(json.dumps(values))


def leave() -> None:
    """Ends the process without the interpreter's exit, where process groups' threads sometimes abort."""
    torch.distributed.barrier()
    os._exit(0)


def no_compiled_collectives() -> None:
    """DeepSpeed's shared-memory collectives for CPUs would be compiled first."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
