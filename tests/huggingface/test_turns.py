# SPDX-License-Identifier: Apache-2.0
"""Two functions that take turns: order, errors, and what PyTorch keeps for each thread."""

from __future__ import annotations

import contextvars

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed_distca.huggingface.turns import Turns

CPU = torch.device("cpu")


def test_they_alternate_and_return_their_results() -> None:
    turns, seen = Turns(CPU), []

    def run(who: int) -> str:
        for i in range(3):
            seen.append((who, i))
            turns.hand_over(who)
        return f"result {who}"

    assert turns.run(lambda: run(0), lambda: run(1)) == ("result 0", "result 1")
    assert seen == [(who, i) for i in range(3) for who in (0, 1)]


@pytest.mark.parametrize("calls", [(0, 0), (0, 3), (3, 0), (1, 4), (4, 1)])
def test_one_may_hand_over_more_often(calls: tuple[int, int]) -> None:
    turns = Turns(CPU)

    def run(who: int) -> int:
        for _ in range(calls[who]):
            turns.hand_over(who)
        return who

    assert turns.run(lambda: run(0), lambda: run(1)) == (0, 1)


@pytest.mark.parametrize("who_fails", [0, 1])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_error_of_either_ends_both(who_fails: int, when: int) -> None:
    turns, finished = Turns(CPU), []

    def run(who: int) -> None:
        for i in range(3):
            if (who, i) == (who_fails, when):
                raise KeyError("no")
            turns.hand_over(who)
        finished.append(who)

    with pytest.raises(KeyError, match="no"):
        turns.run(lambda: run(0), lambda: run(1))
    assert not finished


def test_both_run_as_the_caller_does() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("given")
    turns, packed = Turns(CPU), []

    def run(who: int) -> tuple:
        turns.hand_over(who)
        x = torch.ones(2, 2, requires_grad=True)
        y = x @ x
        return torch.is_grad_enabled(), y.dtype, y.requires_grad, variable.get()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = turns.run(lambda: run(0), lambda: run(1))
    assert found == ((False, torch.bfloat16, False, "given"),) * 2

    turns = Turns(CPU)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        found = turns.run(lambda: run(0), lambda: run(1))
    assert found == ((True, torch.float32, True, "given"),) * 2
    assert len(packed) == 4  # both operands of both products


def test_recomputation_draws_the_same_random_numbers() -> None:
    # Gradients of a product of two masks are that product: any other mask in recomputation shows at once.
    drop = torch.nn.Dropout(0.5)
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    drop(drop(torch.ones(64)))
    expected = torch.get_rng_state()

    torch.manual_seed(1)
    turns = Turns(CPU)

    def layer(x: torch.Tensor, who: int) -> torch.Tensor:
        x = drop(x)
        if torch._C._current_graph_task_id() == -1:
            turns.hand_over(who)
        return drop(x * x)

    inputs = [torch.rand(64, requires_grad=True) for _ in range(2)]
    torch.manual_seed(1)

    def run(who: int) -> torch.Tensor:
        return checkpoint(layer, inputs[who], who, use_reentrant=False)

    outputs = turns.run(lambda: run(0), lambda: run(1))
    assert torch.equal(torch.get_rng_state(), expected)  # that of the first: it drew the same as alone
    kept = [output != 0 for output in outputs]
    assert not torch.equal(*kept)  # numbers of their own
    for output in reversed(outputs):
        output.sum().backward()
    for x, output in zip(inputs, outputs, strict=True):
        # x * x * mask: its derivative is 2 x mask, and x mask = output / x.
        torch.testing.assert_close(x.grad, 2 * output.detach() / x.detach())


@pytest.mark.parametrize("checkpointed", [(0,), (1,), (0, 2), (1, 2), (2,), (0, 1, 2)])
def test_no_random_numbers_come_twice(checkpointed: tuple[int, ...]) -> None:
    turns, drawn, again = Turns(CPU), [], []

    def layer(x: torch.Tensor, who: int) -> torch.Tensor:
        recomputed = torch._C._current_graph_task_id() != -1
        for _ in range(2):
            if not recomputed:
                turns.hand_over(who)
            numbers = torch.rand(4)
            (again if recomputed else drawn).append(tuple(numbers.tolist()))
            x = (x * numbers).sin()
        return x

    def run(who: int) -> torch.Tensor:
        x = torch.ones(4, requires_grad=True)
        for i in range(3):
            x = checkpoint(layer, x, who, use_reentrant=False) if i in checkpointed else layer(x, who)
        return x

    for output in turns.run(lambda: run(0), lambda: run(1)):
        output.sum().backward()
    assert len(drawn) == len(set(drawn)) == 12
    assert len(again) == 4 * len(checkpointed) and set(again) <= set(drawn)
