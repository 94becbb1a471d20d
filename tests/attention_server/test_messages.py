# SPDX-License-Identifier: Apache-2.0
"""The messages that a plan counts are those that a layer sends and receives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.exchange.base import Done, Messages, Round
from deepspeed_distca.attention_server.exchange.process_group import ReceivesLater
from deepspeed_distca.attention_server.kernels import make_kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import RouteCompiler
from tests.distributed.random_plans import random_layout, random_tasks


class Counts:
    """An exchange that moves nothing and counts the messages."""

    early = True

    def __init__(self) -> None:
        self.messages = 0

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Done:
        self.messages += sum(len(part) for part in (sends, receives, *(then or ())))
        for _, tensor in (*receives, *(then[1] if then else ())):
            tensor.zero_()
        return Done()

    def expect(self, receives: Messages, *, sends: bool) -> ReceivesLater:
        return ReceivesLater(self, receives)


@pytest.mark.parametrize("relayed", [False, True])
def test_a_layer_has_the_messages_that_its_plan_counts(relayed) -> None:
    kernel, found = make_kernel("reference"), 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        window = None if rng.random() < 0.7 else 5
        layout = random_layout(rng, ranks=4, documents=5, longest=40)
        tasks = random_tasks(rng, layout, window, stay=float(rng.choice([0.0, 0.5, 1.0])))
        compiler = RouteCompiler(layout, tasks, rule=RelayRule(1, 0) if relayed else RelayRule(10**9, 4))
        found += len(compiler.relayed())
        for rank in range(4):
            part, exchange = RankPlan(compiler.rank(rank)), Counts()
            plan = LayerPlan.whole(part, part, exchange)
            q, k, v = (torch.randn(int(layout.tokens[rank]), h, 8, requires_grad=True) for h in (2, 1, 1))
            out, _ = core_attention(q, k, v, plan, AttentionSpec(0.3, window), kernel)
            assert exchange.messages == compiler.messages("forward")[rank]
            exchange.messages = 0
            out.sum().backward()
            assert exchange.messages == compiler.messages("backward")[rank]
    assert bool(found) == relayed
