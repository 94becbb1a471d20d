# SPDX-License-Identifier: Apache-2.0
"""Memory of another stream: what is made in it, what is not, and how long it is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.borrowed import Lender

LIKE = torch.ones(3, 2)
MAKERS = {
    "empty": lambda t: t.empty(3, 2, device="cpu"),
    "empty_like": lambda t: t.empty_like(LIKE, dtype=torch.float64),
    "zeros": lambda t: t.zeros((3, 2), dtype=torch.float64),
    "zeros_like": lambda t: t.zeros_like(LIKE),
}


@pytest.fixture
def current(monkeypatch) -> list[str]:
    """The streams that were made current, the last one last."""
    streams = ["user"]
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    return streams


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_are_made_by_the_owner_and_filled_by_the_user(name: str, current, monkeypatch) -> None:
    made, filled = [], []
    for maker in ("empty", "empty_like"):
        real = getattr(torch, maker)
        monkeypatch.setattr(torch, maker, lambda *a, real=real, **k: made.append(current[-1]) or real(*a, **k))
    zero_ = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda t: filled.append(current[-1]) or zero_(t))
    make = partial(MAKERS[name], borrowed)
    expected = make()
    assert made == ["user"]
    with Lender("owner", "user"):
        tensor = make()
    assert made == ["user", "owner"] and current[-1] == "user"
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    if "zeros" in name:
        assert not tensor.any() and filled == ["user", "user"]
    make()
    assert made[-1] == "user"


@pytest.mark.parametrize("name", MAKERS)
def test_the_modules_own_functions_are_torchs_where_nobody_lends(name: str) -> None:
    ours, theirs = MAKERS[name](borrowed), MAKERS[name](torch)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_a_tensor_is_kept_until_it_is_released(current) -> None:
    lender = Lender("owner", "user")
    with lender:
        tensor = borrowed.empty(5)
    kept = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert kept() is not None
    lender.release()
    gc.collect()
    assert kept() is None


def test_another_thread_does_not_borrow(current) -> None:
    with Lender("owner", "user"):
        thread = threading.Thread(target=borrowed.empty, args=(3,))
        thread.start()
        thread.join()
    assert current == ["user"]


def test_the_user_is_current_again_after_an_error(current) -> None:
    with Lender("owner", "user"), pytest.raises(TypeError):
        borrowed.empty("much")
    assert current == ["user", "owner", "user"]
