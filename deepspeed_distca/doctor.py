# SPDX-License-Identifier: Apache-2.0
"""What would keep a machine, a DeepSpeed config or a model from running the plugin: looked at by what attach uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from deepspeed_distca import compat
from deepspeed_distca.advise import LLAMA_3_8B, Model, read_config
from deepspeed_distca.attention_server.kernels import (
    BackwardInputs,
    Gradients,
    Kernel,
    KernelError,
    make_kernel,
    select_kernel,
)
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.compat.deepspeed import import_quietly
from deepspeed_distca.config import BLOCK, DistCAConfig, get_distca_config
from deepspeed_distca.cost_choice import own_cost_model
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import home_routes

#: Of a kernel's results on a few documents, against the reference in fp64: some times what rounding makes of them.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_LENGTHS = [300, 1, 129, 594]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: "ok"; "note": works, and is good to know; "bad": does not work.
        what: was looked at.
        text: what was found, and what to do about it.
    """

    verdict: Literal["ok", "note", "bad"]
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:5} {self.what:12} {self.text}"


def examine(config: Path | None, model: Path | None, tokens: int | None) -> list[Finding]:
    """Everything that one process can look at without an engine.

    Args:
        config: a DeepSpeed config.
        model: a model's config.json; Llama-3-8B's sizes without.
        tokens: of a rank in a micro-batch, for memory.
    """
    found = [*_versions()]
    block, sizes = DistCAConfig(), Model.of(LLAMA_3_8B)
    if config is not None:
        try:
            given = get_distca_config(read_config(config))
            found.append(_of_block(given))
            block = given or block
        except (OSError, ValueError) as error:
            found.append(Finding("bad", "ds_config", f"{config}: {error}"))
    if model is not None:
        try:
            sizes = Model.of(read_config(model))
            found.append(Finding("ok", "model", sizes.name))
        except (OSError, ValueError) as error:
            found.append(Finding("bad", "model", f"{model}: {error}"))
    found.append(_devices())
    found += _kernel(block, sizes.heads)
    if tokens is not None:
        found.append(_memory(block, sizes, tokens))
    return found


def _versions() -> Iterator[Finding]:
    """The libraries, and the private names of theirs that every engine needs."""
    for library, tried in compat.TRIED.items():
        try:
            here = version(library)
        except PackageNotFoundError:
            missing = Finding("bad", library, f'not installed: pip install "{library}=={tried[-1]}"')
            yield missing if library != "datasets" else Finding("note", library, "not installed; only data need it")
            continue
        known = here.partition("+")[0] in tried
        yield Finding(
            "ok" if known else "note", library, here + ("" if known else f", which nobody tried: {', '.join(tried)}")
        )
    try:
        import_quietly()
        compat.check("engine", "zero_3")
        yield Finding("ok", "compat", "all names that are not public are there")
    except (compat.CompatError, ImportError) as error:
        yield Finding("bad", "compat", str(error))


def _of_block(block: DistCAConfig | None) -> Finding:
    if block is None:
        return Finding("note", "ds_config", f"no `{BLOCK}` block that is enabled: the plugin would do nothing")
    return Finding("ok", "ds_config", f"its `{BLOCK}` block holds")


def _devices() -> Finding:
    count = torch.cuda.device_count()
    if not count:
        return Finding("note", "GPUs", "none: CPUs run it to try it, not to gain")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    apart = [f"{i} and {j}" for i in range(count) for j in range(i) if not torch.cuda.can_device_access_peer(i, j)]
    if apart:
        return Finding(
            "note", "GPUs", f"{count} x {names}; no peer copies between {', '.join(apart[:4])}: NCCL is used"
        )
    return Finding("ok", "GPUs", f"{count} x {names}" + (", each reaches the others' memory" if count > 1 else ""))


def _kernel(block: DistCAConfig, heads: Heads) -> list[Finding]:
    """The attention kernel that a layer would get, run on a few documents, and the cost model."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        kernel = select_kernel(
            block.kernel,
            device=device,
            dtype=dtype,
            q_heads=heads.query,
            kv_heads=heads.key_value,
            head_dim=heads.head_dim,
        )
    except KernelError as error:
        return [Finding("bad", "kernel", str(error))]
    apart = kernel_error(kernel, heads, device, dtype)
    text = f"{kernel.name} on {device.type}: relative error {apart:.1e}, forward and backward"
    found = [Finding("ok" if apart <= _TOLERANCE[dtype] else "bad", "kernel", text)]
    if device.type == "cuda" and kernel.name == "reference":
        found = [Finding("note", "kernel", f"{text}; it is slow: pip install -e .[gpu] on Hopper or Blackwell")]
    try:
        choice = own_cost_model(block, heads, device=device, dtype=dtype, window=None)
        found += [] if choice is None else [Finding("ok", "cost model", choice.source)]
    except ValueError as error:
        found.append(Finding("bad", "cost model", str(error)))
    return found


def kernel_error(kernel: Kernel, heads: Heads, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error of a kernel's out, dq, dk and dv on a few packed documents, against the reference in
    fp64; infinite where it is no number."""
    generator = torch.Generator().manual_seed(0)
    tasks = RankPlan(home_routes(Layout.from_lengths([_LENGTHS]), 0)).local
    spec = AttentionSpec(heads.head_dim**-0.5)

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(sum(_LENGTHS), count, heads.head_dim, generator=generator).to(device, dtype)

    def run(by: Kernel, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v, dout = (t.to(wide) for t in given)
        out, lse = by.forward(q, k, v, tasks, spec)
        dk, dv = (torch.empty_like(t, dtype=by.grad_dtype(wide)) for t in (k, v))
        dq = torch.empty_like(q)
        by.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, Gradients(dq, dk, dv))
        return out, dq, dk, dv

    given = drawn(heads.query), drawn(heads.key_value), drawn(heads.key_value), drawn(heads.query)
    pairs = zip(run(kernel, dtype), run(make_kernel("reference"), torch.float64), strict=True)
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in pairs]
    return max(error if error == error else float("inf") for error in errors)


def _memory(block: DistCAConfig, model: Model, tokens: int) -> Finding:
    gib = 2**30
    layers, heads = sum(model.windows.values()), model.heads
    kept = layers * tokens * heads.query * (heads.head_dim * heads.element_size + 4) / gib  # out, and lse in fp32
    staging = block.advanced.staging_mib / 1024
    text = f"{staging:.1f} GiB a GPU for staging where peer copies are used"
    if block.keep_attention is not False:
        text += f"; under activation checkpointing {kept:.1f} GiB for kept attention (`keep_attention`)"
    return Finding("note", "memory", text)


def report(found: list[Finding], as_json: bool) -> str:
    """What to print."""
    good = all(finding.verdict != "bad" for finding in found)
    if as_json:
        return json.dumps({"good": good, "findings": [finding.__dict__ for finding in found]})
    verdict = "the plugin can run here" if good else "the plugin cannot run as this is: see what is bad"
    return "\n".join([*map(str, found), verdict])
