# SPDX-License-Identifier: Apache-2.0
"""Updates a policy from its own rollouts, with GRPO's loss, in micro-batches of equal tokens below a cap.

    deepspeed --num_accelerators 2 examples/hf_llama/train_grpo.py --deepspeed_config configs/ds_config/zero1.json

A small Llama answers random prompts, at lengths that are drawn with a long tail. An answer's reward is the share of
one token in it. Every rank has all rollouts, so `pack_step` finds the same micro-batches on all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from grpo import LOSSES, MicroBatch, Rollout, advantages, grpo_loss, log_probabilities, micro_batch, token_weights
from train import CONFIGS, load_config, start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from deepspeed_distca import pack_step

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
    rollouts.add_argument("--prompt-tokens", type=int, default=16)
    rollouts.add_argument("--longest-answer", type=int, default=256)
    train = parser.add_argument_group("training")
    train.add_argument("--tokens-per-rank", type=int, default=512, help="the most tokens of a rank's micro-batch")
    train.add_argument("--loss", choices=LOSSES, default="dapo")
    train.add_argument("--steps", type=int, default=10)
    train.add_argument("--iterations", type=int, default=2, help="updates from the same rollouts")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="left out: on GPUs yes, on CPUs no")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(CONFIGS / "zero1.json"), gradient_accumulation_steps=1)
    return parser.parse_args()


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
    # How many micro-batches a step has is known when its rollouts are: the config has 1, and `update` says which is
    # the last.
    engine, *_ = deepspeed.initialize(model=LlamaForCausalLM(sizes), config=load_config(args))
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # every rank samples answers of its own
    draw = np.random.default_rng(args.seed)  # the same on every rank
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        rollouts = roll_out(engine, args, draw)
        rewards = [r.answer.count(WANTED) / len(r.answer) for r in rollouts]
        answers = [len(r.answer) for r in rollouts]
        gains, weights = advantages(rewards, args.group), token_weights(args.loss, answers, args.longest_answer)
        packed = pack_step([len(r.prompt) + len(r.answer) for r in rollouts], args.tokens_per_rank, ranks())
        mine = [batch[dist.get_rank()] for batch in packed]
        batches = [
            micro_batch(*([values[i] for i in row] for values in (rollouts, gains, weights)), engine.device)
            for row in mine
        ]
        old: list[torch.Tensor] = []
        for _ in range(args.iterations):
            update(engine, batches, old)
        if dist.get_rank() == 0:
            stats = engine.distca.stats
            print(
                f"step {step}/{args.steps} reward {np.mean(rewards):.4f} micro-batches {len(packed)} balance "
                f"{stats.balance_before:.2f} -> {stats.balance_after:.2f} seconds {time.perf_counter() - started:.2f}",
                flush=True,
            )
    engine.destroy()
    dist.destroy_process_group()


def ranks() -> int:
    return dist.get_world_size()


@torch.no_grad()
def roll_out(engine: Any, args: argparse.Namespace, draw: np.random.Generator) -> list[Rollout]:
    """Answers of the policy to random prompts, on every rank those of all ranks."""
    prompts = draw.integers(0, args.vocab_size, (args.prompts, args.prompt_tokens))
    lengths = draw.lognormal(np.log(args.longest_answer / 16), 1.0, (args.prompts, args.group))
    lengths = lengths.clip(1, args.longest_answer).astype(int)
    given = torch.tensor(prompts[dist.get_rank() :: ranks()], device=engine.device)
    engine.eval()
    tokens = engine.module.generate(
        given,
        attention_mask=torch.ones_like(given),
        num_return_sequences=args.group,
        do_sample=True,
        top_k=0,
        min_new_tokens=args.longest_answer,
        max_new_tokens=args.longest_answer,
        pad_token_id=0,
    )
    engine.train()
    gathered: list[Any] = [None] * ranks()
    dist.all_gather_object(
        gathered, tokens[:, args.prompt_tokens :].view(-1, args.group, args.longest_answer).tolist()
    )
    return [
        Rollout(prompts[p].tolist(), gathered[p % ranks()][p // ranks()][g][: lengths[p, g]])
        for p in range(args.prompts)
        for g in range(args.group)
    ]


def update(engine: Any, micro_batches: Sequence[MicroBatch], old: list[torch.Tensor]) -> None:
    """One optimizer step.

    Args:
        micro_batches: of this rank, as many as every other rank has.
        old: log-probabilities by the policy that gave the answers, by micro-batch; filled in where there are none yet.
    """
    for number, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
        new = log_probabilities(engine(**batch.inputs, use_cache=False).logits[0], batch.targets)
        if number == len(old):
            old.append(new.detach())
        loss = grpo_loss(new, old[number], batch.advantages, batch.weights)
        # DeepSpeed takes the mean over ranks; the weights have been made for the sum.
        engine.backward(loss * ranks())
        engine.step()


if __name__ == "__main__":
    main()
