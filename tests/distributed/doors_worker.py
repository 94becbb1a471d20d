# SPDX-License-Identifier: Apache-2.0
"""Batches and models at the plugin's borders, on two ranks: what comes out, against every document run alone."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MBartConfig,
    MBartForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from deepspeed_distca import Layout, PackedSequenceCollator
from deepspeed_distca.data import AccumulationLoader
from deepspeed_distca.data.from_layout import batch_from_layout
from tests.distributed.scenarios import compared, outcomes
from tests.tiny_llama import SIZES, VOCABULARY, llama

LENGTHS = [[13, 5, 29], [3, 7, 2]]


def run() -> dict[str, Any]:
    """See :func:`~.scenarios.outcomes`."""
    return outcomes(SCENARIOS)


def documents(lengths: list[list[int]], rank: int | None = None) -> list[list[int]]:
    """Token ids of a rank's documents, or of all."""
    draw = torch.Generator().manual_seed(5)
    made = [[torch.randint(1, VOCABULARY, (n,), generator=draw).tolist() for n in row] for row in lengths]
    return made[rank] if rank is not None else [d for row in made for d in row]


def mine() -> list[list[int]]:
    return documents(LENGTHS, dist.get_rank())


def engine_of(model: torch.nn.Module, **config: Any) -> Any:
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "distca": {"advanced": {"granularity": 1, "min_gain": 0.0, "tolerance": 0.0}},
            **config,
        },
    )
    engine.train()
    return engine


def alone(
    model: torch.nn.Module, all_documents: list[list[int]], firsts: list[int] | None = None
) -> tuple[float, list[torch.Tensor]]:
    """Mean loss over the targets of documents that are run one by one, and every parameter's gradient.

    Args:
        firsts: the place of each one's first target, 1 in all of them where it is left out.
    """
    model.train()
    firsts = firsts or [1] * len(all_documents)
    targets = sum(len(d) - first for d, first in zip(all_documents, firsts, strict=True))
    total = 0.0
    for document, first in zip(all_documents, firsts, strict=True):
        if len(document) < 2:
            continue
        ids = torch.tensor([document])
        logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float()
        loss = cross_entropy(logits, ids[0, first:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def worst(make: Callable[[], torch.nn.Module], all_documents: list[list[int]], batch: dict[str, Any]) -> float:
    """The largest relative error of a micro-batch's loss and gradients."""
    wanted, references = alone(make(), all_documents)
    engine = engine_of(make())
    loss = engine(**batch).loss
    engine.backward(loss)
    total = loss.detach().clone()
    dist.all_reduce(total)
    error = abs(float(total) / dist.get_world_size() - wanted) / wanted
    return max(error, compared([p.grad for p in engine.module.parameters()], references))


# -- models -----------------------------------------------------------------------------------------------------------


def phi(limit: int = 16) -> Phi3ForCausalLM:
    """Its rotary frequencies are others for rows of more than `limit` tokens."""
    torch.manual_seed(0)
    rope = dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0] * 4,
        long_factor=[4.0, 3.0, 2.0, 1.5],
        original_max_position_embeddings=limit,
    )
    config = Phi3Config(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=limit,
        rope_parameters=rope,
        pad_token_id=0,
        sliding_window=None,
    )
    return Phi3ForCausalLM(config)


def dynamic() -> LlamaForCausalLM:
    """Its rotary frequencies follow the length beyond 16 tokens."""
    torch.manual_seed(0)
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=rope))


def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            dropout=0.0,
            use_cache=False,
        )
    )


def mbart() -> MBartForCausalLM:
    return MBartForCausalLM(
        MBartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=128,
            dropout=0.0,
            is_encoder_decoder=False,
            is_decoder=True,
            use_cache=False,
        )
    )


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            **SIZES,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
    )


# -- batches ----------------------------------------------------------------------------------------------------------


def row(given: list[list[int]]) -> torch.Tensor:
    return torch.tensor([list(itertools.chain(*given))])


def positions(given: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[i for d in given for i in range(len(d))]])


def numbers(given: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[k for k, d in enumerate(given, 1) for _ in d]])


def padded_behind(row: torch.Tensor, value: int) -> torch.Tensor:
    return torch.cat([row, torch.full((1, 4), value)], 1)


def padded(given: list[list[int]], left: bool) -> dict[str, torch.Tensor]:
    """A document a row."""
    longest = max(map(len, given))

    def pad(values: list[int], value: int) -> list[int]:
        fill = [value] * (longest - len(values))
        return fill + values if left else values + fill

    return {
        "input_ids": torch.tensor([pad(d, 0) for d in given]),
        "attention_mask": torch.tensor([pad([1] * len(d), 0) for d in given]),
        "labels": torch.tensor([pad(d, -100) for d in given]),
    }


def collated(given: list[list[int]]) -> dict[str, Any]:
    return PackedSequenceCollator()([{"input_ids": d} for d in given])


# -- scenarios --------------------------------------------------------------------------------------------------------


def numbered_mask() -> float:
    """As LLaMA-Factory and axolotl pack: documents numbered from 1, padding 0, beside position ids."""
    given = mine()
    batch = {
        "input_ids": padded_behind(row(given), 0),
        "attention_mask": padded_behind(numbers(given), 0),
        "position_ids": padded_behind(positions(given), 0),
        "labels": padded_behind(row(given), 0),  # targets across documents and on padding, which are left out
    }
    return worst(llama, documents(LENGTHS), batch)


def longrope_packed() -> float:
    return worst(phi, documents(LENGTHS), collated(mine()))


def longrope_spanning() -> float:
    """A long document over both ranks, each of which has less of it than the frequencies' limit."""
    layout = Layout.from_ranks([[(0, 0, 14), (1, 0, 5)], [(0, 14, 10), (2, 0, 7)]])
    given = documents([[24, 5, 7]])
    batch = batch_from_layout(dict(enumerate(given)), layout, dist.get_rank())
    return worst(phi, given, batch)


def in_two_places() -> float:
    """A document in two segments of one rank, another one between them."""
    first, second, *others = all_documents = documents([[24, 5], [7, 3]])
    layout = Layout.from_ranks([[(0, 0, 14), (1, 0, 5), (0, 14, 10)]])
    if dist.get_rank():
        return worst(llama, all_documents, collated(others))
    batch = batch_from_layout({0: first, 1: second}, layout, 0)
    return worst(llama, all_documents, batch)


def dynamic_short() -> float:
    given = [[13, 5, 15], [3, 7, 2]]
    return worst(dynamic, documents(given), collated(documents(given, dist.get_rank())))


def dynamic_long() -> float:
    return worst(dynamic, documents(LENGTHS), collated(mine()))


def left_padded_opt() -> float:
    """It makes its positions of the mask."""
    return worst(opt, documents(LENGTHS), padded(mine(), left=True))


def shifted_model() -> float:
    return worst(mbart, documents(LENGTHS), collated(mine()))


def router_loss() -> float:
    """The router's loss of padded rows is that of the model without the plugin, which leaves padding out."""
    batch = padded(mine(), left=False)
    plain = mixtral()(**batch).aux_loss
    loss = engine_of(mixtral())(**batch).aux_loss
    return abs(float(loss - plain)) / float(plain)


def stand_in() -> float:
    """Rank 1 has no documents, and rank 0's loss does not count: the router gets no gradient from the stand-in."""
    first = dist.get_rank() == 0
    engine = engine_of(mixtral())
    output = engine(**(collated(mine()) if first else collated([])))
    assert first or float(output.aux_loss) == float(output.loss) == 0
    engine.backward(output.loss * float(not first))
    return max(float(p.grad.abs().max()) for p in engine.module.parameters())


def embeddings_given() -> float:
    """Rank 1 has no documents, and nothing is trained but what makes the embeddings: backward comes through attention
    there too, for rank 0's rows."""

    def make() -> LlamaForCausalLM:
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embed" in name)
        return model

    given = documents(LENGTHS[:1])
    wanted, references = alone(make(), given)
    engine = engine_of(make())
    embed = engine.module.get_input_embeddings()
    batch = collated(given if dist.get_rank() == 0 else [])
    loss = engine(inputs_embeds=embed(batch.pop("input_ids")), **batch).loss
    engine.backward(loss)
    error = abs(float(loss.detach()) / 2 - wanted) / wanted if dist.get_rank() == 0 else float(loss.detach())
    reference = max(references, key=lambda gradient: float(gradient.norm()))
    return max(error, float((embed.weight.grad - reference).norm() / reference.norm()))


def own_mean() -> float:
    """Token classification takes the mean of its own targets: the plugin weights it over all ranks."""

    def make() -> LlamaForTokenClassification:
        torch.manual_seed(0)
        return LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=5, classifier_dropout=0.0))

    def batch_of(given: list[list[int]]) -> dict[str, torch.Tensor]:
        labels = row(given) % 5
        labels[row(given) % 3 == 0] = -100
        return {"input_ids": row(given), "position_ids": positions(given), "labels": labels}

    reference = make()
    counted = total = 0
    for document in documents(LENGTHS):
        batch = batch_of([document])
        count = int((batch["labels"] != -100).sum())
        if count:
            total = total + reference(**batch).loss * count
            counted += count
    (total / counted).backward()
    engine = engine_of(make())
    engine.backward(engine(**batch_of(mine())).loss)
    return max(
        float((p.grad - r.grad).norm()) / max(float(r.grad.norm()), 1e-6)
        for p, r in zip(engine.module.parameters(), reference.parameters(), strict=True)
    )


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3, pad_token_id=0))


def one_result_a_row() -> float:
    """A classifier of padded rows has the loss that it has without the plugin."""
    batch = {**padded(mine(), left=False), "labels": torch.arange(3) % 3}
    wanted = classifier()(**batch).loss
    return abs(float(engine_of(classifier())(**batch).loss - wanted)) / float(wanted)


def two_documents_in_such_a_row() -> str:
    given = mine()
    engine_of(classifier())(input_ids=row(given), position_ids=positions(given), labels=torch.zeros(1).long())
    return "no error"


def a_micro_batch_given_up() -> float:
    """Rank 0 detaches without a backward, while rank 1 is busy with something else: nobody is to blame."""
    engine = engine_of(llama())
    engine(**collated(mine()))
    if dist.get_rank() == 0:
        engine.distca.detach()
    else:
        time.sleep(4.0)
    dist.barrier()
    engine.distca.detach()
    return 0.0


def tensor_parallel() -> float:
    """Both ranks are one data-parallel rank, and DeepSpeed compares their arguments in the first forward."""
    given = documents(LENGTHS, 0)
    wanted, _ = alone(llama(), given)
    engine = engine_of(llama(), tensor_parallel={"autotp_size": 2})
    errors = []
    for _ in range(2):
        loss = engine(input_ids=row(given), position_ids=positions(given), labels=row(given)).loss
        errors.append(abs(loss.item() - wanted) / wanted)
    assert engine.first_dataloader_check.id not in engine.module._forward_pre_hooks  # it has looked, and gone
    return max(errors)


def refused_by_a_hook() -> str:
    """A hook of somebody else's, before the plugin's, does not let rank 1's first batch through."""
    engine = engine_of(llama())

    def refuse(*_: Any) -> None:
        hook.remove()
        raise ValueError("a hook refuses this batch")

    if dist.get_rank() == 1:
        hook = engine.module.register_forward_pre_hook(refuse, prepend=True)
    try:
        engine(**collated(mine()))
        words = "no error"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    engine(**collated(mine()))
    return words


class WithTeacher(torch.nn.Module):
    """A frozen model, and after it the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = llama(seed=3).requires_grad_(False), llama()

    def forward(self, **batch: Any) -> Any:
        with torch.no_grad():
            self.teacher(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        return self.student(**batch)


def with_teacher() -> float:
    _, references = alone(llama(), documents(LENGTHS))
    engine = engine_of(WithTeacher())
    loss = engine(**collated(mine())).loss
    engine.backward(loss)
    return compared([p.grad for p in engine.module.student.parameters()], references)


def step_targets_on_one_rank() -> str:
    engine = engine_of(llama(), gradient_accumulation_steps=2)
    more = {"step_targets": 90} if dist.get_rank() == 0 else {}
    engine(**collated(mine()), **more)
    return "no error"


@contextmanager
def warnings_of_the_plugin() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepspeed_distca").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("deepspeed_distca").removeHandler(handler)


def parts_called_alone() -> float:
    """A loss of the base model's hidden states, three times: one warning. None where the engine was called."""
    engine, batch = engine_of(llama()), collated(mine())
    given = {key: batch[key] for key in ("input_ids", "position_ids")}
    with warnings_of_the_plugin() as said:
        engine.backward(engine(**batch).loss)
        none = len([words for words in said if "called alone" in words])
        for _ in range(3):
            engine.backward(engine.module.lm_head(engine.module.model(**given).last_hidden_state).sum())
    return float(none + abs(len([words for words in said if "called alone" in words]) - 1))


def warned_of_steps(steps: int) -> float:
    """How often a loader that counts for so many micro-batches is warned of, beside an engine's steps of two."""
    engine = engine_of(llama(), gradient_accumulation_steps=2)
    with warnings_of_the_plugin() as said:
        lengths = [LENGTHS, [[4, 9], [31, 2]], [[8], [9]], [[7], [3, 30]]]
        for batch in AccumulationLoader([collated(documents(each, dist.get_rank())) for each in lengths], steps):
            engine.backward(engine(**batch).loss)
            engine.step()
    return float(sum("an optimizer step had" in words for words in said))


def warned_once() -> float:
    return abs(warned_of_steps(1) - 1) + abs(warned_of_steps(4) - 1) + warned_of_steps(2)


def one_bad_rank(spoil: Callable[[dict[str, Any]], None]) -> Callable[[], str]:
    """Both ranks get an error, and the next micro-batch is right again."""

    def scenario() -> str:
        engine = engine_of(llama())
        batch = collated(mine())
        if dist.get_rank() == 1:
            spoil(batch)
        try:
            engine(**batch)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        else:
            words = "no error"
        engine(**collated(mine()))
        return words

    return scenario


SCENARIOS: dict[str, Callable[[], Any]] = {
    "numbered mask": numbered_mask,
    "longrope, packed": longrope_packed,
    "longrope, a document over two ranks": longrope_spanning,
    "a document in two places of a row": in_two_places,
    "dynamic rope, short documents": dynamic_short,
    "dynamic rope, a long document": dynamic_long,
    "left-padded rows, positions from the mask": left_padded_opt,
    "a model without position ids": shifted_model,
    "router loss of padded rows": router_loss,
    "a stand-in token": stand_in,
    "embeddings where a rank has no documents": embeddings_given,
    "own mean": own_mean,
    "a micro-batch that is given up": a_micro_batch_given_up,
    "one result a row": one_result_a_row,
    "two documents in a row of one result": two_documents_in_such_a_row,
    "ids out of range": one_bad_rank(lambda b: b["input_ids"].fill_(10**6)),
    "negative num_targets": one_bad_rank(lambda b: b.update(num_targets=-7)),
    "a frozen model beside": with_teacher,
    "parts that are called alone": parts_called_alone,
    "a loader that counts for other steps than the engine's": warned_once,
    "step_targets on one rank": step_targets_on_one_rank,
    "float cu_seqlens": one_bad_rank(lambda b: b.update(layout=None, cu_seqlens=torch.tensor([0.0, 2.9, 12.0]))),
    "a batch that a hook refuses": refused_by_a_hook,
    # Last: DeepSpeed keeps the groups that it makes for it.
    "tensor parallelism": tensor_parallel,
}
