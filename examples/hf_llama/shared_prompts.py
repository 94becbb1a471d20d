# SPDX-License-Identifier: Apache-2.0
"""Updates a policy by GRPO's loss from several answers to each prompt, which is computed once for all of them.

    deepspeed --num_accelerators 2 examples/hf_llama/shared_prompts.py --deepspeed_config configs/ds_config/zero1.json

`PrefixCollator` puts a prompt into the row once, and its answers behind it, each of which attends to the prompt and to
itself. Loss and gradients are the same as where every answer has a prompt of its own, as in `train_grpo.py`. Prompts
and answers are random here, in place of those of a rollout server; an answer's reward is the share of one token in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from grpo import LOSSES, advantages, grpo_loss, token_weights
from train import CONFIGS, load_config, start_processes
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_distca  # noqa: F401  reads the `distca` block when deepspeed.initialize is called
from deepspeed_distca.data import PrefixCollator, pack_step, token_logps

#: The token that is rewarded.
WANTED = 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--hidden-size", type=int, default=64)
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--vocab-size", type=int, default=64)
    rollouts = parser.add_argument_group("rollouts")
    rollouts.add_argument("--prompts", type=int, default=8, help="of a step, on all ranks together")
    rollouts.add_argument("--group", type=int, default=8, help="answers to each prompt")
    rollouts.add_argument("--prompt-tokens", type=int, default=192)
    rollouts.add_argument("--longest-answer", type=int, default=128)
    train = parser.add_argument_group("training")
    train.add_argument("--tokens-per-rank", type=int, default=2048, help="the most tokens of a rank's micro-batch")
    train.add_argument("--loss", choices=LOSSES, default="dapo")
    train.add_argument("--steps", type=int, default=10)
    train.add_argument("--iterations", type=int, default=2, help="updates from the same rollouts")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="left out: on GPUs yes, on CPUs no")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(CONFIGS / "zero1.json"), gradient_accumulation_steps=1)
    return parser.parse_args()


class Group(NamedTuple):
    """A prompt and its answers, each with its advantage and with what its tokens weigh in the step's loss."""

    prompt: list[int]
    answers: list[list[int]]
    advantages: list[float]
    weights: list[float]

    @property
    def tokens(self) -> int:
        """In a row: the last token of the prompt is there once for each answer."""
        return len(self.prompt) - 1 + sum(1 + len(answer) for answer in self.answers)


class MicroBatch(NamedTuple):
    """A rank's groups as a row.

    Attributes:
        inputs: of the model; no labels, since the loss is ours.
        targets: the token after each position, -100 where there is none; int64 [1, tokens].
        answers: bool [1, tokens], which of them are tokens of answers.
        advantages, weights: of the tokens of answers, float32 [answers' tokens].
    """

    inputs: dict[str, Any]
    targets: torch.Tensor
    answers: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


def main() -> None:
    args = parse_args()
    start_processes()
    torch.manual_seed(args.seed)
    sizes = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.prompt_tokens + args.longest_answer,
    )
    engine, *_ = deepspeed.initialize(model=LlamaForCausalLM(sizes), config=load_config(args))
    ranks, draw = dist.get_world_size(), np.random.default_rng(args.seed)  # the same on every rank
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        groups = make_groups(args, draw)
        packed = pack_step([group.tokens for group in groups], args.tokens_per_rank, ranks)
        batches = [micro_batch([groups[i] for i in row[dist.get_rank()]], engine.device) for row in packed]
        old: list[torch.Tensor] = []
        losses = [update(engine, batches, old) for _ in range(args.iterations)]
        tokens = sum(group.tokens for group in groups)
        alone = sum(len(group.prompt) + len(answer) for group in groups for answer in group.answers)
        if dist.get_rank() == 0:
            print(
                f"step {step}/{args.steps} tokens {tokens}, without sharing {alone} micro-batches {len(packed)} "
                f"losses {' '.join(f'{loss:.6f}' for loss in losses)} seconds {time.perf_counter() - started:.2f}",
                flush=True,
            )
    engine.destroy()
    dist.destroy_process_group()


def make_groups(args: argparse.Namespace, draw: np.random.Generator) -> list[Group]:
    """Random prompts and answers of a step, on every rank those of all ranks."""
    prompts = draw.integers(0, args.vocab_size, (args.prompts, args.prompt_tokens)).tolist()
    lengths = draw.integers(1, args.longest_answer + 1, args.prompts * args.group)
    answers = [draw.integers(0, args.vocab_size, length).tolist() for length in lengths]
    gains = advantages([answer.count(WANTED) / len(answer) for answer in answers], args.group)
    weights = token_weights(args.loss, [len(answer) for answer in answers], args.longest_answer)
    found = []
    for place, prompt in enumerate(prompts):
        own = slice(place * args.group, (place + 1) * args.group)
        found.append(Group(prompt, answers[own], gains[own], weights[own]))
    return found


def micro_batch(groups: Sequence[Group], device: torch.device) -> MicroBatch:
    """Packs groups; none at all for a rank without any."""
    features = [{"prompt_ids": g.prompt, "answers": g.answers, "weights": g.weights} for g in groups]
    batch = PrefixCollator()(features)
    # `row_answers` counts the answers of the batch in the order given; -1 where there is no token of one.
    gains = torch.tensor([gain for group in groups for gain in group.advantages], dtype=torch.float32)
    answers = batch["row_answers"] >= 0
    return MicroBatch(
        {key: batch[key].to(device) for key in ("input_ids", "position_ids")} | {"layout": batch["layout"]},
        batch["shift_labels"].to(device),
        answers.to(device),
        gains[batch["row_answers"][answers]].to(device),
        batch["row_weights"][answers].to(device),
    )


def update(engine: Any, micro_batches: Sequence[MicroBatch], old: list[torch.Tensor]) -> float:
    """One optimizer step; returns its loss over all ranks.

    Args:
        micro_batches: of this rank, as many as every other rank has.
        old: log-probabilities by the policy that gave the answers, by micro-batch; filled in where there are none yet.
    """
    ranks = dist.get_world_size()
    total = torch.zeros((), device=engine.device)
    for number, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
        logits = engine(**batch.inputs, use_cache=False).logits
        new = token_logps(logits, batch.targets)[batch.answers]
        if number == len(old):
            old.append(new.detach())
        # The formula of arXiv:2402.03300, with the clipping and the weights that TRL's GRPOTrainer has.
        loss = grpo_loss(new, old[number], batch.advantages, batch.weights)
        # DeepSpeed takes the mean over ranks; the weights have been made for the sum.
        engine.backward(loss * ranks)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item()


if __name__ == "__main__":
    main()
