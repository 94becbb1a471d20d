# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: models as people change them (LoRA, frozen, compiled, several at once), and evaluation."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import deepspeed_distca
from deepspeed_distca import Layout, PackedSequenceCollator
from deepspeed_distca.attention_server.coordination.agreement import AgreementError
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface.decoders import UnsupportedModelError
from deepspeed_distca.huggingface.front_door import BatchError
from deepspeed_distca.report import write_run
from tests.distributed import model_families
from tests.distributed.engine_worker import documents_of, ds_config, reference, tiny_llama
from tests.distributed.models_worker import DISTCA, LAYOUT, worst_error


def _engine(model, zero: int = 0, **block):
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(zero, 1, {**DISTCA, **block}))
    return engine


def _documents(seed: int):
    layout = Layout.from_ranks(LAYOUT).validate()
    return layout, documents_of(layout, np.random.default_rng(seed))


def _step(engine, documents, layout) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over ranks, and gradients of what is trained."""
    engine.train()
    loss = engine(**batch_from_layout(documents, layout, dist.get_rank())).loss
    engine.backward(loss)
    gradients = {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size(), gradients


def _errors(model, plain, seed: int) -> dict:
    layout, documents = _documents(seed)
    expected_loss, expected = reference(plain, [documents])
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    engine = _engine(model)
    loss, gradients = _step(engine, documents, layout)
    error, parameter = worst_error({n: g for n, g in expected.items() if n in trained}, gradients)
    return {
        "loss_error": abs(loss - expected_loss),
        "gradient_error": error,
        "parameter": parameter,
        "trained": sorted(gradients) == sorted(trained),
        "moved": engine.distca.stats.bytes_moved > 0,
    }


def lora(seed: int, targets: list[str], checkpointing: str) -> dict:
    """LoRA on some projections; with q_proj alone, keys and values need no gradient in the first layer."""

    def build():
        model = tiny_llama(seed)
        torch.manual_seed(seed)
        config = LoraConfig(
            r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config)

    model, plain = build(), build()
    if checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return _errors(model, plain, seed)


def frozen(seed: int) -> dict:
    """Embeddings and the first layer frozen: nothing that reaches its attention needs a gradient."""
    model = tiny_llama(seed, num_hidden_layers=3)
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return _errors(model, copy.deepcopy(model), seed)


def detached(seed: int, reentrant: bool) -> dict:
    """Hooks that are taken out between forward and backward are there for recomputation, and gone after it."""
    model = tiny_llama(seed)
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    engine = _engine(model)
    layout, documents = _documents(seed)
    expected_loss, expected = reference(plain, [documents])
    engine.train()
    loss = engine(**batch_from_layout(documents, layout, dist.get_rank())).loss
    engine.distca.detach()
    engine.backward(loss)
    total = loss.detach().clone()
    dist.all_reduce(total)
    error, _ = worst_error(expected, {n: p.grad for n, p in engine.module.named_parameters()})
    del loss
    gc.collect()
    attention = [m for m in model.modules() if type(m).__name__ == "LlamaAttention"]
    assert attention and not any(m._forward_pre_hooks or m._forward_hooks for m in attention)
    return {"loss_error": abs(float(total) / 2 - expected_loss), "gradient_error": error}


def copies(seed: int) -> dict:
    """A copy of a model that runs in two nano-batches computes with its own weights, and gets its own gradients."""
    engine = _engine(tiny_llama(seed), overlap="ping_pong")
    layout, documents = _documents(seed)
    for _ in range(2):
        _step(engine, documents, layout)
    twin = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    plain = tiny_llama(seed)
    plain.load_state_dict(twin.state_dict())
    ids = torch.arange(1, 14)[None]
    for model in (twin, plain):
        model.train()
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    part = batch_from_layout(documents, layout, dist.get_rank())
    try:
        engine.module.model(**{k: part[k] for k in ("input_ids", "position_ids", "layout")})
        alone = "no error"
    except UnsupportedModelError as error:
        alone = str(error)
    return {"error": worst_error(expected, {n: p.grad for n, p in twin.named_parameters()})[0], "alone": alone}


def second_engine(seed: int) -> dict:
    """A second engine of a model takes the hooks of the first one out; neither gives a graph of gradients."""
    model = tiny_llama(seed)
    plain = copy.deepcopy(model)
    first = _engine(model)
    layout, documents = _documents(seed)
    loss = first.module(**batch_from_layout(documents, layout, dist.get_rank())).loss  # not DeepSpeed's to look after
    try:
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {**_errors(model, plain, seed), "refused": refused}


def compiled(seed: int) -> dict:
    """A compiled model is exact too, and other shapes and plans do not make it compile without end."""
    model = tiny_llama(seed, num_hidden_layers=1)
    plain = copy.deepcopy(model)
    engine = _engine(torch.compile(model, dynamic=True))
    layout, documents = _documents(seed)
    expected_loss, expected = reference(plain, [documents])
    loss, gradients = _step(engine, documents, layout)
    gradients = {name.removeprefix("_orig_mod."): g for name, g in gradients.items()}
    error, parameter = worst_error(expected, gradients)
    graphs = []
    for turn in range(5):
        layout = Layout.from_lengths([[31 + 5 * turn, 4], [9, 3, 2 + turn]])
        _step(engine, documents_of(layout, np.random.default_rng(turn)), layout)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {
        "loss_error": abs(loss - expected_loss),
        "gradient_error": error,
        "parameter": parameter,
        "graphs": graphs,
    }


def compiled_layers(seed: int, reentrant: bool) -> dict:
    """Layers that are compiled each for itself and recomputed in backward."""
    model = tiny_llama(seed)
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    return _errors(model, plain, seed)


def two_models(seed: int) -> dict:
    """Two engines and a frozen reference, all built from one configuration object, taking turns."""
    policy = tiny_llama(seed)
    torch.manual_seed(seed + 1)
    other, reference_model = type(policy)(policy.config), type(policy)(policy.config)
    plain, plain_other = copy.deepcopy(policy), copy.deepcopy(other)
    layout, documents = _documents(seed)
    ids = torch.tensor([documents[0]])
    with torch.no_grad():
        expected_logits = reference_model(input_ids=ids).logits
    engines = _engine(policy), _engine(other)
    batch = batch_from_layout(documents, layout, dist.get_rank())
    losses = []
    for engine in engines:
        engine.train()
        losses.append(engine(**batch).loss)
    with torch.no_grad():
        between = reference_model(input_ids=ids).logits
    worst = 0.0
    for engine, loss, model in zip(reversed(engines), reversed(losses), (plain_other, plain), strict=True):
        engine.backward(loss)
        _, expected = reference(model, [documents])
        worst = max(worst, worst_error(expected, {n: p.grad for n, p in engine.module.named_parameters()})[0])
    return {"gradient_error": worst, "reference_error": float((between - expected_logits).abs().max())}


def unweighted(seed: int) -> dict:
    """token_weighted_loss off: the mean over ranks of their own means, and of 0 where one has no documents."""
    results = {}
    for name, lengths in (("full", [[31, 4], [12, 9, 1]]), ("empty", [[31, 4], []])):
        model = tiny_llama(seed)
        plain = copy.deepcopy(model)
        layout = Layout.from_lengths(lengths)
        documents = documents_of(layout, np.random.default_rng(seed))
        plain.train()
        total = 0.0
        for rank in range(2):
            row = batch_from_layout(documents, layout, rank)
            if lengths[rank]:
                keys = ("input_ids", "labels", "shift_labels", "position_ids")
                loss = plain(**{k: row[k] for k in keys}, use_cache=False).loss / 2
                loss.backward()
                total += float(loss.detach())
        loss, gradients = _step(_engine(model, token_weighted_loss=False), documents, layout)
        expected = {n: p.grad for n, p in plain.named_parameters()}
        results[name] = max(abs(loss - total), worst_error(expected, gradients)[0])
    return results


def router_losses(seed: int) -> dict:
    """Auxiliary losses of experts are a mean over each rank's row: equal to the same rows without the plugin."""
    options = {**model_families.EXACT["Mixtral"][1], "sliding_window": None, "output_router_logits": True}
    options["router_aux_loss_coef"] = 0.5
    model = model_families.build("mixtral", options, seed)
    plain = copy.deepcopy(model)
    lengths = [[31, 4], [12, 9, 1]]
    layout = Layout.from_lengths(lengths)
    documents = documents_of(layout, np.random.default_rng(seed))
    rows = [batch_from_layout(documents, layout, rank) for rank in range(2)]
    targets = sum(row["num_targets"] for row in rows)
    plain.train()
    total = 0.0
    for row in rows:
        out = plain(**{k: row[k] for k in ("input_ids", "labels", "shift_labels", "position_ids")}, use_cache=False,
                    num_items_in_batch=targets / 2)  # fmt: skip
        (out.loss / 2).backward()
        total += float(out.loss.detach()) / 2
    loss, gradients = _step(_engine(model), documents, layout)
    expected = {n: p.grad for n, p in plain.named_parameters()}
    return {"loss_error": abs(loss - total), "gradient_error": worst_error(expected, gradients)[0]}


def evaluation(seed: int) -> dict:
    """What the model gives in evaluation, between training steps, against the plain model with the same weights."""
    engine = _engine(tiny_llama(seed))
    layout, documents = _documents(seed)
    _step(engine, documents, layout)
    measured = engine.distca.stats.server_seconds
    plain = tiny_llama(seed)
    plain.load_state_dict(engine.module.state_dict())
    plain.eval()
    engine.eval()
    rank = dist.get_rank()
    rng = np.random.default_rng((seed, rank))
    prompt = torch.from_numpy(rng.integers(1, 97, size=(2, 7)))
    errors = {}

    def compare(name: str, run: Callable) -> None:
        with torch.no_grad():
            errors[name] = float((run(engine.module) - run(plain)).abs().max())

    compare("logits", lambda m: m(input_ids=prompt).logits)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    compare("padded", lambda m: m(input_ids=prompt, attention_mask=mask).logits[1])
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    compare("generate", lambda m: m.generate(prompt, attention_mask=torch.ones_like(prompt), **options))

    def cached(model) -> torch.Tensor:
        first = model(input_ids=prompt[:, :4], use_cache=True)
        return model(input_ids=prompt[:, 4:], past_key_values=first.past_key_values, use_cache=True).logits

    compare("cache", cached)
    # A packed row on this rank alone, on as many batches as it happens to have: rank 0 has two, rank 1 three.
    collate = PackedSequenceCollator()
    for turn in range(2 + rank):
        texts = [rng.integers(1, 97, size=n).tolist() for n in (5, 1, 11 + turn, 3 + rank)]
        with torch.no_grad():
            out = engine(**collate([{"input_ids": t} for t in texts]))
            alone = torch.cat([plain(input_ids=torch.tensor([t])).logits for t in texts], dim=1)
        errors[f"packed {turn}"] = float((out.logits - alone).abs().max())
    with torch.no_grad():
        errors["nothing"] = abs(float(engine(**collate([])).loss))
    errors["the step's statistics"] = engine.distca.stats.server_seconds - measured
    compare("copy", lambda m: (copy.deepcopy(m) if m is engine.module else m)(input_ids=prompt).logits)
    batch = collate([{"input_ids": t} for t in texts])
    rows = {key: batch[key] for key in ("input_ids", "position_ids")}
    compare("copy, packed", lambda m: (copy.deepcopy(m)(**batch) if m is engine.module else m(**rows)).logits)
    compare("a part alone", lambda m: m.model(input_ids=prompt).last_hidden_state)
    engine.module.set_attn_implementation("eager")
    compare("weights", lambda m: m(input_ids=prompt, output_attentions=True).logits)
    assert engine.module.config._attn_implementation == "eager"
    layout, documents = _documents(seed + 1)
    loss, gradients = _step(engine, documents, layout)  # and training goes on
    assert engine.module.config._attn_implementation == "eager"
    expected_loss, expected = reference(plain, [documents])
    errors["training after it"] = max(abs(loss - expected_loss), worst_error(expected, gradients)[0])
    return errors


def one_rank_fails(seed: int) -> dict:
    """A batch that cannot be used on rank 0 alone: an error on both, by name, and the next step works."""
    engine = _engine(tiny_llama(seed))
    engine.train()
    ids = torch.arange(1, 13)[None]
    good = dict(input_ids=ids, labels=ids)
    bad = {
        "3-D position ids": dict(position_ids=torch.zeros(3, 1, 12, dtype=torch.long)),
        "starts in the middle": dict(position_ids=torch.arange(5, 17)[None]),
        "4-D mask": dict(attention_mask=torch.ones(1, 1, 12, 12)),
        "output_attentions": dict(output_attentions=True),
        "wrong layout": dict(layout=Layout.from_lengths([[5]])),
        "wrong part of a layout": dict(
            layout=Layout([(0, 0, 0, 9), (1, 0, 9, 12)], 2), position_ids=torch.arange(12)[None]
        ),
        "wrong padding mask": dict(attention_mask=torch.tensor([[0, 1, 1]])),
        "a name that nothing reads": dict(document_ids=(torch.arange(12) > 4).long()[None]),
        "position ids of other tokens": dict(position_ids=torch.arange(11)[None]),
    }
    messages = {}
    for name, change in bad.items():
        try:
            engine(**{**good, **(change if dist.get_rank() == 0 else {})})
            messages[name] = "no error"
        except (ValueError, AgreementError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    engine.backward(engine(**good).loss)
    return messages


def later_mask(seed: int) -> dict:
    """Gemma 3 attends both ways among an image's tokens: nothing of that shows in a first batch of text alone."""
    part = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
    text = dict(part, vocab_size=97, num_hidden_layers=2, num_key_value_heads=1, head_dim=8, sliding_window=64)
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = dict(part, num_hidden_layers=1, image_size=8, patch_size=2, vision_use_head=False)
    special = dict(mm_tokens_per_image=4, image_token_index=90, boi_token_index=91, eoi_token_index=92)
    torch.manual_seed(seed)
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_id=90, **special)
    engine = _engine(Gemma3ForConditionalGeneration(config))
    engine.train()
    ids = torch.arange(1, 25)[None]
    with_image = ids.clone()
    with_image[:, 4:8] = 90
    image = dict(pixel_values=torch.randn(1, 3, 8, 8), token_type_ids=(with_image == 90).long())
    messages = {}
    sibling = Gemma3ForConditionalGeneration(config).eval()  # of the same configuration objects
    for name, batch in (("text", dict(input_ids=ids)), ("image", dict(input_ids=with_image, **image))):
        try:
            engine(**batch, labels=ids)
            messages[name] = "no error"
        except UnsupportedModelError as error:
            messages[name] = str(error)
        with torch.no_grad():
            assert sibling(**batch).logits.isfinite().all()
    return messages


def other_losses(seed: int) -> dict:
    """What all ranks say where one divides its loss by something that is no number of targets, or has another loss
    function than the probe saw; and whether the next micro-batch, and one after another attach, are right."""
    layout, documents = _documents(seed)
    batch = batch_from_layout(documents, layout, dist.get_rank())
    model = tiny_llama()
    engine = _engine(model)
    expected, _ = reference(tiny_llama(), [documents])

    def refused(**given) -> str:
        try:
            engine(**batch, **given)
        except (AgreementError, BatchError, UnsupportedModelError) as error:
            return str(error)
        return "no error"

    last = dist.get_rank() == dist.get_world_size() - 1
    said = {}
    for name, items in {"zero": 0, "text": "9", "two": torch.ones(2), "nan": torch.tensor(torch.nan)}.items():
        said[name] = refused(num_items_in_batch=items if last else 9)
    right = [abs(_step(engine, documents, layout)[0] - expected)]
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    expected, _ = reference(plain, [documents])
    own = model.loss_function
    if last:
        model.loss_function = lambda *args, **rest: own(*args, **rest)
    said["another"] = refused()
    engine.distca.detach()
    deepspeed_distca.attach(engine)
    right.append(abs(_step(engine, documents, layout)[0] - expected))
    warnings = []
    engine.distca._hooks._say = warnings.append
    for training in (True, False):
        engine.train(training)
        own_batch = PackedSequenceCollator()([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])
        engine.backward(engine(**own_batch).loss)
        engine.step()
    return {"said": said, "loss_errors": right, "warnings": warnings}


def monitored(seed: int, folder: str) -> dict:
    """Three optimizer steps of two micro-batches with DeepSpeed's CSV monitor."""
    csv = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    engine, *_ = deepspeed.initialize(model=tiny_llama(seed), config=ds_config(0, 2, DISTCA, **csv))
    engine.train()
    expected, measured, times = [], [], []
    for turn in range(6):
        layout = Layout.from_lengths([[131 + 5 * turn, 4], [9, 3]])
        documents = documents_of(layout, np.random.default_rng(turn))
        engine.backward(engine(**batch_from_layout(documents, layout, dist.get_rank())).loss)
        begin = time.perf_counter()
        engine.step()
        if turn % 2:
            stats = engine.distca.stats
            assert stats.tokens == 2 * (131 + 5 * turn + 16) - 5
            times.append([begin, time.perf_counter(), stats.tokens])
            expected.append([stats.balance_before, stats.bytes_moved])
            measured.append([stats.server_seconds * 1e3, stats.exposed_seconds * 1e3])
    history = engine.distca.history
    assert [step.tokens for step in history] == [tokens for *_, tokens in times] and history[0].seconds > 0
    if dist.get_rank() == 0:
        write_run(engine, Path(folder) / "run.html")
        assert "3 optimizer steps" in (Path(folder) / "run.html").read_text()
    dist.barrier()
    engine.distca.detach()
    left = sorted({"step", "backward"} & vars(engine).keys())
    return {"expected": expected, "measured": measured, "times": times, "left": left}


def run(seed: int, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    results = {
        f"lora {'+'.join(targets)} {checkpointing}": lora(seed, targets, checkpointing)
        for targets, checkpointing in (
            (["q_proj"], "off"),
            (["q_proj"], "reentrant"),
            (["q_proj"], "non-reentrant"),
            (["o_proj", "down_proj"], "non-reentrant"),
            (["q_proj", "k_proj", "v_proj"], "off"),
        )
    }
    results["frozen"] = frozen(seed)
    results["second engine"] = second_engine(seed)
    for reentrant in (False, True):
        results[f"compiled layers {reentrant}"] = compiled_layers(seed, reentrant)
    return {
        "exact": results,
        "detached": [detached(seed, reentrant) for reentrant in (False, True)],
        "compiled": compiled(seed),
        "two models": two_models(seed),
        "router losses": router_losses(seed),
        "unweighted": unweighted(seed),
        "copies": copies(seed),
        "evaluation": evaluation(seed),
        "one rank fails": one_rank_fails(seed),
        "later mask": later_mask(seed),
        "other losses": other_losses(seed),
        "monitored": monitored(seed, folder),
    }
