# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the engine tests: DeepSpeed training with the plugin against documents run alone."""

from __future__ import annotations

import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import deepspeed_distca
from deepspeed_distca import Layout
from deepspeed_distca.attention_server import steps
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.attention_server.statistics import TimedKernel
from deepspeed_distca.attention_server.task_batch import TaskBatch
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.scheduler import CostModel, worth
from deepspeed_distca.scheduler.cost_model import PHASES, Phase
from tests.tiny_llama import VOCABULARY, llama


def tiny_llama(seed: int = 0, **options) -> LlamaForCausalLM:
    """For any lengths; see tests/tiny_llama.py."""
    return llama(seed=seed, **{"max_position_embeddings": 4096, "attn_implementation": "sdpa", **options})


def ds_config(zero: int, accumulation: int, distca: dict | None, lr: float = 1e-3, **more) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        **more,
    }
    return config if distca is None else {**config, "distca": distca}


def documents_of(layout: Layout, rng: np.random.Generator) -> dict[int, list[int]]:
    lengths: dict[int, int] = {}
    for _, document, start, length in layout.segments.tolist():
        lengths[document] = max(lengths.get(document, 0), start + length)
    return {d: rng.integers(0, VOCABULARY, size=n).tolist() for d, n in sorted(lengths.items())}


def reference(model, micro_batches: list[dict[int, list[int]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Token-weighted loss and gradients with every document run alone, in one process. Ranks, which all hold the same
    model and call this with the same documents, run a part of them each."""
    model.train()
    model.zero_grad()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    documents = [d for batch in micro_batches for d in batch.values()]
    targets = max(1, sum(len(d) - 1 for d in documents))
    total = 0.0
    # Those of one token have no target. The longest are dealt out first, so that no rank waits long.
    for tokens in sorted((d for d in documents if len(d) > 1), key=len, reverse=True)[rank::world]:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(tokens[1:]), reduction="sum") / targets
        loss.backward()
        total += float(loss.detach())
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    if world > 1:
        flat = torch.cat([torch.tensor([total]), *(g.flatten() for g in gradients.values())])
        dist.all_reduce(flat)
        total, sizes = float(flat[0]), [g.numel() for g in gradients.values()]
        parts = flat[1:].split(sizes)
        gradients = {n: part.view_as(g) for (n, g), part in zip(gradients.items(), parts, strict=True)}
    return total, gradients


def full_gradients(engine) -> dict[str, torch.Tensor]:
    """Averaged gradients of every parameter, before the optimizer's step."""
    from deepspeed.utils import safe_get_full_grad

    if engine.zero_optimization_stage() == 0:
        return {n: p.grad.clone() for n, p in engine.module.named_parameters()}
    return {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters()}


def enable_checkpointing(model, how: str) -> None:
    """How: "off", "reentrant", "non-reentrant", or "deepspeed": transformers' layers with DeepSpeed's function."""
    if how != "off":
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    if how == "deepspeed":
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint


@contextmanager
def counting() -> Iterator[Counter]:
    """Counts forwards of core attention, forward calls of kernels, and exchanges that are started."""
    counts = Counter(attention=0, kernels=0, exchanges=0)

    def counted(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, owner, attribute in (
            ("attention", steps.ForwardSteps, "serve"),
            ("kernels", TimedKernel, "forward"),
            ("exchanges", PeerToPeerExchange, "start"),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, counted(name, getattr(owner, attribute))))
        yield counts


def kept() -> list[int]:
    """Of every micro-batch that is alive, how many layers have their attention kept."""
    return [len(o) for o in gc.get_objects() if type(o) is KeptAttention]


def digest(tensors: list[torch.Tensor]) -> str:
    """Of all bits."""
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()


def train_once(
    zero: int, accumulation: int, checkpointing: str, layouts: list, seed: int, distca: dict, model_options: dict
) -> dict:
    """One optimizer step over the layouts (one per micro-batch); errors against the reference on this rank."""
    rng = np.random.default_rng(seed)
    layouts = [Layout.from_ranks(ranks).validate() for ranks in layouts]
    batches = [documents_of(layout, rng) for layout in layouts]
    expected_loss, expected = reference(tiny_llama(seed, **model_options), batches)

    model = tiny_llama(seed, **model_options)
    enable_checkpointing(model, checkpointing)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(zero, accumulation, distca))
    engine.train()
    rank = dist.get_rank()
    parts = [batch_from_layout(d, layout, rank) for d, layout in zip(batches, layouts, strict=True)]
    step_targets = sum(part["num_targets"] for part in parts)
    losses, gradients, waiting = [], {}, []
    with counting() as counts:
        for index, part in enumerate(parts):
            loss = engine(**part, step_targets=step_targets).loss
            losses.append(loss)
            waiting.append(sum(kept()))
            engine.backward(loss)
            if index == len(parts) - 1:
                gradients = full_gradients(engine)
            engine.step()
    left = sum(kept())  # while the losses, and with them the graphs, are still there
    total = torch.stack(losses).detach().mean()
    dist.all_reduce(total)
    worst, which = 0.0, ""
    scale = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        error = float((gradients[name].cpu() - gradient).norm()) / max(float(gradient.norm()), 1e-3 * scale, 1e-30)
        if error >= worst:
            worst, which = error, name
    return {
        "loss": float(total) / dist.get_world_size(),
        "expected": expected_loss,
        "gradient_error": worst,
        "parameter": which,
        "bytes_moved": engine.distca.stats.bytes_moved,
        "exposed_seconds": engine.distca.stats.exposed_seconds,
        "counts": counts,
        "kept": {"waiting": waiting, "left": left},
        "digest": digest([*losses, *gradients.values()]),
    }


def train_cases(cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    return [train_once(**case) for case in cases]


def backward(engine, batch: dict, expected_loss: float, expected: dict[str, torch.Tensor]) -> dict:
    """Forward and backward of one micro-batch, without a step: the mean loss over ranks, what it was to be, the
    largest relative error of a parameter's gradient, and a digest of the loss and all gradients."""
    loss = engine(**batch).loss
    engine.backward(loss)
    gradients = full_gradients(engine)
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = [float((gradients[n] - g).norm() / g.norm().clamp_min(1e-6)) for n, g in expected.items()]
    return {
        "loss": float(total) / dist.get_world_size(),
        "expected": expected_loss,
        "gradient_error": max(errors),
        "digest": digest([total, *gradients.values()]),
    }


def train_grouped(lengths: list[list[int]], servers: int) -> dict:
    """One step over groups of servers, through the collator; errors against the documents run alone."""
    deepspeed.init_distributed("gloo")
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, VOCABULARY, size=n).tolist() for n in row] for row in lengths]
    flat = dict(enumerate(d for row in documents for d in row))
    expected_loss, expected = reference(tiny_llama(), [flat])
    block = {"servers": servers, "advanced": {"granularity": 8}}
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 1, block))
    features = [{"input_ids": d} for d in documents[dist.get_rank()]]
    outcome = backward(engine, deepspeed_distca.PackedSequenceCollator()(features), expected_loss, expected)
    return {**outcome, "servers": len(engine.distca.stats.predicted_server_seconds)}


def train_with_a_pool(lengths: list[list[list[int]]], zero: int, checkpointing: str, **block) -> dict:
    """A step over micro-batches of a DataLoader of each rank, by micro-batch and rank the documents that are drawn;
    the first step warms up. Errors against the documents run alone, and each rank's part of the attention of the
    last step, forward and backward, as planned and as its kernel was given it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(0)
    documents = [[[rng.integers(0, VOCABULARY, size=n).tolist() for n in row] for row in batch] for batch in lengths]
    expected_loss, expected = reference(
        tiny_llama(), [dict(enumerate(d for row in b for d in row)) for b in documents]
    )
    model = tiny_llama()
    enable_checkpointing(model, checkpointing)
    block = {"advanced": {"granularity": 8}, "keep_attention": True, **block}
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(zero, len(lengths), block, lr=0.0))
    engine.train()
    mine = [[{"input_ids": d} for d in batch[rank]] for batch in documents]
    loader = DataLoader(mine, batch_size=None, collate_fn=deepspeed_distca.PackedSequenceCollator())
    targets = sum(max(0, len(d) - 1) for batch in documents for d in batch[rank])
    area, work = CostModel.area(), 0

    def counted(phase: Phase, kernel: Callable) -> Callable:
        def call(self, *args):
            nonlocal work
            for tasks in (given for given in args if isinstance(given, TaskBatch)):
                unseen = tasks.q_len * (tasks.q_len - 1) // 2 if tasks.causal else 0
                work += area.phase(phase).pair * int((tasks.q_len * tasks.k_len - unseen).sum())
            return kernel(self, *args)

        return call

    with ExitStack() as stack:
        for phase in PHASES:
            kernel = counted(phase, getattr(TimedKernel, phase))
            stack.enter_context(mock.patch.object(TimedKernel, phase, kernel))
        for _ in range(2):
            losses, gradients = [], {}
            work = 0
            for index, batch in enumerate(loader):
                loss = engine(**batch, step_targets=targets).loss
                losses.append(loss.detach())
                engine.backward(loss)
                if index == len(lengths) - 1:
                    gradients = full_gradients(engine)
                engine.step()
    found = torch.tensor([float(sum(losses)) / len(losses), *(float(work * (r == rank)) for r in range(world))])
    dist.all_reduce(found)
    planned = engine.distca.stats.predicted_server_seconds
    scale = max(float(g.norm()) for g in expected.values())
    errors = [float((gradients[n] - g).norm()) / max(float(g.norm()), 1e-3 * scale) for n, g in expected.items()]
    return {
        "loss": float(found[0]) / world,
        "expected": expected_loss,
        "gradient_error": max(errors),
        "planned": [seconds / sum(planned) for seconds in planned],
        "computed": (found[1:] / found[1:].sum()).tolist(),
    }


def pools(cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    return [train_with_a_pool(**case) for case in cases]


def loss_curves(steps: int, **options) -> dict:
    """Losses of the same training with the plugin and without it (sdpa over the packed row, use_cache off)."""
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    curves = {}
    for name, block in (("plugin", {"advanced": {"granularity": 16}, **options}), ("plain", None)):
        engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 1, block, lr=3e-3))
        losses = []
        for step in range(steps):
            rng = np.random.default_rng(step % 5)
            # Ranks have equally many targets, so that the mean over ranks is the token mean without the plugin too.
            lengths = [[61], [10, 30, 22]] if step % 2 else [[31, 31], [62]]
            rows = [[rng.integers(0, VOCABULARY, size=n) for n in row] for row in lengths]
            targets = [sum(len(d) - 1 for d in row) for row in rows]
            batch = deepspeed_distca.PackedSequenceCollator()([{"input_ids": d} for d in rows[rank]])
            if block is None:
                batch["num_items_in_batch"] = sum(targets) / world
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / world)
        curves[name] = losses
    return curves


def _engine(block: dict | None, **options):
    deepspeed.init_distributed("gloo")
    return deepspeed.initialize(model=tiny_llama(**options), config=ds_config(0, 1, block))[0]


def _batch(*lengths: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    features = [{"input_ids": rng.integers(0, VOCABULARY, size=n)} for n in lengths]
    return deepspeed_distca.PackedSequenceCollator()(features)


def bad_input() -> dict:
    """Rank 0 gives 3-D position ids; both ranks must hear of it, and go on with the next micro-batch."""
    engine = _engine({})
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    if dist.get_rank() == 0:
        batch["position_ids"] = torch.zeros(3, 1, 8, dtype=torch.int64)
    try:
        engine(**batch)
        error = ""
    except (ValueError, RuntimeError) as raised:
        error = str(raised)
    return {"error": error, "afterwards": float(engine(**_batch(9, 4)).loss.detach())}


def missing_rank(seconds: float) -> dict:
    """Rank 1 runs no micro-batch."""
    engine = _engine({"timeout_seconds": seconds})
    error = ""
    if dist.get_rank() == 0:
        try:
            engine(**_batch(9, 4))
        except RuntimeError as raised:
            error = str(raised)
        _say("error")
        _hear("that was all")  # rank 0 holds the store
    else:
        _hear("error")  # there, but not coming
        _say("that was all")
    return {"error": error}


def late_rank() -> bool:
    """Rank 1 comes to a micro-batch when rank 0 is in its first layer, and not before; whether it is there when rank 0
    is through it."""
    engine = _engine({})
    engine(**_batch(9, 4))
    through = []
    first = engine.module.model.layers[0]
    if dist.get_rank() == 0:
        first.register_forward_pre_hook(lambda *_: _say("in the layer"))
        first.register_forward_hook(lambda *_: through.append(_said("coming")))
    else:
        _hear("in the layer")
        time.sleep(0.5)  # rank 0 does not go on meanwhile
        _say("coming")
    engine(**_batch(9, 4))
    return all(through)


def _say(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(f"test: {what}", "said")


def _said(what: str) -> bool:
    return dist.distributed_c10d._get_default_store().check([f"test: {what}"])


def _hear(what: str) -> None:
    while not _said(what):
        time.sleep(0.05)


def different_options() -> dict:
    """Rank 1 has another tolerance."""
    deepspeed.init_distributed("gloo")
    try:
        _engine({"advanced": {"tolerance": 0.1 * (1 + dist.get_rank())}})
        return {"error": ""}
    except RuntimeError as raised:
        return {"error": str(raised)}


def different_plans() -> dict:
    """Rank 1's scheduler decides otherwise on the same layout: it finds nothing to move."""
    engine = _engine({"advanced": {"granularity": 16}})
    if dist.get_rank() == 1:
        decide = worth.balance
        worth.balance = lambda *given, **options: decide(*given, **{**options, "tolerance": 1000.0})
    try:
        engine(**_batch(*([200] if dist.get_rank() == 0 else [9, 4])))
        return {"error": ""}
    except RuntimeError as raised:
        return {"error": str(raised)}


def different_inputs(required: bool, overlap: str = "local_first") -> dict:
    """Rank 0 gives embeddings that need gradients, rank 1 ids, to a model of which only MLPs are trained; after two
    micro-batches of ids on both.

    Args:
        required: the model was told that its embeddings need gradients in any case.
    """
    deepspeed.init_distributed("gloo")
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" in name
    if required:
        model.enable_input_require_grads()
    config = ds_config(0, 1, {"overlap": overlap, "advanced": {"min_gain": 0.0, "granularity": 1}})
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    batch = _batch(*([90] if dist.get_rank() == 0 else [9, 4]))
    for _ in range(2):
        engine.backward(engine(**batch).loss)
        engine.step()
    if dist.get_rank() == 0:
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    try:
        engine.backward(engine(**batch).loss)
        return {"error": ""}
    except RuntimeError as raised:
        return {"error": str(raised)}


def left_out_layers(skips: list[list[int]], seconds: float = 60.0, layers: int = 3, **block) -> dict:
    """Four micro-batches of which rank 0 has more; in the third each rank's model leaves layers out.

    Args:
        skips: by rank, which.
    """
    deepspeed.init_distributed("gloo")
    model = tiny_llama(num_hidden_layers=layers)
    advanced = {"min_gain": 0.0, "granularity": 1, "tolerance": 0.005}
    config = ds_config(0, 1, {"timeout_seconds": seconds, "advanced": advanced, **block})
    engine = deepspeed.initialize(model=model, config=config)[0]
    skipped: set[int] = set()
    for index, layer in enumerate(model.model.layers):

        def forward(hidden, *args, index: int = index, own: Callable = layer.forward, **kwargs):
            return hidden if index in skipped else own(hidden, *args, **kwargs)

        layer.forward = forward
    rank = dist.get_rank()
    losses, errors, took = [], [], 0.0
    for number in range(4):
        skipped.update(skips[rank] if number == 2 else ())
        start = time.monotonic()
        try:
            loss = engine(**_batch(*([190] if rank == 0 else [9, 4]))).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        except (ValueError, RuntimeError) as raised:
            errors.append(str(raised))
            took = max(took, time.monotonic() - start)
        skipped.clear()
    if rank == 0:  # which holds the store
        _hear("left out layers")
    else:
        _say("left out layers")
    return {"losses": losses, "errors": errors, "seconds": took, "moved": engine.distca.stats.bytes_moved}


def on_and_off() -> dict:
    """What the block switches, and what is left after detach() and uninstall()."""
    original = deepspeed.initialize
    plain = _engine(None)
    own_hooks = len(plain.module._forward_pre_hooks) + len(plain.module._forward_hooks)
    found = {
        "absent": hasattr(plain, "distca"),
        "disabled": hasattr(_engine({"enabled": False}), "distca"),
    }
    engine = _engine({})
    found["enabled"] = hasattr(engine, "distca")
    names = []
    watch = engine.module.model.norm.register_forward_pre_hook(
        lambda *_: names.append(engine.module.config._attn_implementation)
    )
    engine(**_batch(9, 4))
    watch.remove()
    engine.distca.detach()
    after = engine.module.config._attn_implementation
    assert names[0].startswith("distca")
    hooks = len(engine.module._forward_pre_hooks) + len(engine.module._forward_hooks)
    deepspeed_distca.uninstall()
    uninstalled = deepspeed.initialize is not original and not hasattr(deepspeed.initialize, "_distca_original")
    deepspeed_distca.install()
    deepspeed_distca.install()
    installed = hasattr(deepspeed.initialize, "_distca_original")
    twice = hasattr(deepspeed.initialize._distca_original, "_distca_original")
    return {
        **found,
        "detached_implementation": after,
        "hooks_left": hooks - own_hooks,
        "uninstalled": uninstalled,
        "installed_again": installed and not twice,
    }


def evaluation() -> dict:
    """Evaluation and generation after a training step, against the plain model."""
    engine = _engine({})
    plain = tiny_llama()
    engine(**_batch(21, 4))  # a planned forward first: the model's attention must come back afterwards
    engine.eval()
    plain.eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        padded = engine(input_ids=ids, attention_mask=mask).logits - plain(input_ids=ids, attention_mask=mask).logits
        packed_error = 0.0
        if dist.get_rank() == 0:  # ranks evaluate different numbers of batches
            batch = _batch(17, 1, 30, seed=3)
            logits = engine(**batch).logits[0]
            row = 0
            for n in (17, 1, 30):
                alone = plain(input_ids=batch["input_ids"][:, row : row + n], use_cache=False).logits[0]
                packed_error = max(packed_error, float((logits[row : row + n] - alone).norm() / alone.norm()))
                row += n
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        same = torch.equal(engine.module.generate(ids, **settings), plain.generate(ids, **settings))
    return {"generated_same": same, "padded_error": float(padded[mask.bool()].norm()), "packed_error": packed_error}
