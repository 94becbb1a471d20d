# SPDX-License-Identifier: Apache-2.0
"""A program for every rank, started by torchrun with TRITON_INTERPRET=1: a Llama with Liger's kernels, which Triton's
interpreter runs on CPU, with the `distca` block against the same model without block and without Liger."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch.distributed as dist
import triton.language as tl
from liger_kernel.ops import rms_norm
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers.models.llama import modeling_llama
from triton.runtime import interpreter

from tests.huggingface.compared import apart, config_of, trained
from tests.tiny_llama import llama

#: Short, since the interpreter is slow.
STEPS = [[[41, 5], [9]], [[3], [4, 37]]]
_CONVERTED = interpreter._implicit_cvt


def as_compiled(argument: Any) -> Any:
    """Compiled kernels get floats as scalars of Triton's, which Liger counts on; the interpreter leaves them alone."""
    if isinstance(argument, float):
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _CONVERTED(argument)


def run() -> dict[str, Any]:
    plain = trained(llama, config_of(False), STEPS)
    interpreter._implicit_cvt = as_compiled
    # Its own is a function of CUDA's library, which the interpreter does not have.
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)
    apply_liger_kernel_to_llama()
    found = apart(trained(llama, config_of(True), STEPS), plain)
    model = llama()
    parts = {type(module).__name__ for module in model.modules()}
    found["patched"] = sorted(
        [name for name in parts if name.startswith("Liger")]
        + [
            f.__name__
            for f in (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaForCausalLM.forward)
            if f.__module__.startswith("liger_kernel")
        ]
    )
    return found


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    outcome = run()
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.barrier()
    os._exit(0)  # threads of process groups sometimes abort in the interpreter's exit
