# SPDX-License-Identifier: Apache-2.0
"""Repeated calls of a library against the library itself, and which calls are never repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed_distca.attention_server.borrowed import Lender
from deepspeed_distca.attention_server.kernels.repeated import Call, Programs, Repeated, no_programs

#: What a library's module may look like: kernels are kept by the function that compiles them.
MODULE = """
calls = []

def scale(x, factor, out):
    out.copy_(factor * x)

def add(x, y, _, out):
    out.copy_(x + y)

def add_one(x, out):
    if "add" not in add_one.compile_cache:
        add_one.compile_cache["add"] = add
    one = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    add_one.compile_cache["add"](x, one, (None, 3), out)

add_one.compile_cache = {}

def attend(x, y, *, factor, out, more=None):
    calls.append(x.shape)
    work = torch.empty_like(x)
    if "scale" not in attend.compile_cache:
        attend.compile_cache["scale"] = scale
    attend.compile_cache["scale"](x.detach(), factor, work)
    BEFORE
    attend.compile_cache[LAST](work, y, None, out)
    add_one(out, out)
    AFTER

attend.compile_cache = {"add": add}
"""


def library(before: str = "pass", after: str = "pass", last: str = '"add"') -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch}
    exec(MODULE.replace("BEFORE", before).replace("AFTER", after).replace("LAST", last), names)
    return names


def call(rows: int = 8, factor: float = 2.0, **more: Any) -> Call:
    x, y = torch.randn(rows, 4, requires_grad=True), torch.randn(rows, 4)
    out = torch.full((rows, 4), torch.nan)
    return Call((x, y), {"factor": factor, "out": out, **more}, (out,))


@torch.no_grad()
def run(repeated: Repeated, programs: Programs, given: Call, example: Callable[[], Call] = call) -> None:
    repeated(given, programs, example)


@torch.no_grad()
def check(names: dict[str, Any], times: int, **options: Any) -> int:
    """Calls of one batch give what the library gives; how often the library was asked, tries in small included."""
    repeated, programs = Repeated(names["attend"]), no_programs(None)
    for _ in range(times):
        given = call(**options)
        (x, y), factor = given.args, given.kwargs["factor"]
        run(repeated, programs, given, lambda: call(3, **options))
        assert torch.allclose(given.kwargs["out"], factor * x + y)
    return len(names["calls"])


def test_further_calls_do_not_ask_the_library() -> None:
    names = library()
    # The first one, and two in small: one is recorded and one is compared.
    assert check(names, 5) == 3
    assert [shape[0] for shape in names["calls"]] == [8, 3, 3]
    assert set(names["attend"].compile_cache) == {"add", "scale"}


def test_what_is_known_is_not_tried_out_again() -> None:
    names = library()
    repeated = Repeated(names["attend"])
    for _ in range(3):  # batches
        programs = no_programs(None)
        for rows, factor in ((8, 2.0), (5, 2.0), (8, 3.0), (8, 2.0)):
            given = call(rows, factor)
            run(repeated, programs, given)
            assert torch.allclose(given.results[0], factor * given.args[0] + given.args[1])
        assert len(programs) == 3 and all(programs.values())
    assert len(names["calls"]) == 2 + 3 * 3


@pytest.mark.parametrize(
    "names",
    [
        library(before="work += 1 - 1"),  # something else is done, which happens to change nothing
        library(before="work = work.clone()"),
        library(before="work.mul_(2).mul_(0.5)"),
        library(after="scale(out, 1.0, out)"),  # a kernel that nothing tells of, and that changes nothing
        library(after='attend.compile_cache["scale"](x=out, factor=1.0, out=out)'),
        library(after="[attend.compile_cache[n](*[out, 1.0, out]) for n in ['scale'] if len(calls) % 2]"),
    ],
)
def test_what_a_library_does_beside_is_done(names: dict[str, Any]) -> None:
    assert check(names, 4) >= 3


def test_what_only_the_library_does_is_left_to_it() -> None:
    names = library(after="out.mul_(2)")
    repeated, programs = Repeated(names["attend"]), no_programs(None)
    for _ in range(4):
        given = call()
        run(repeated, programs, given)
        assert torch.allclose(given.results[0], 2 * (2.0 * given.args[0] + given.args[1]))
    assert list(programs.values()) == [None] and len(names["calls"]) == 6


def test_memory_that_was_written_before_is_noticed() -> None:
    """What is made may happen to hold zeros, or what the last call left there."""
    names = library(before="work.copy_(factor * x)", last='"add"')
    names["attend"].compile_cache["scale"] = lambda x, factor, work: None
    repeated, programs = Repeated(names["attend"]), no_programs(None)
    for _ in range(3):
        given = call()
        run(repeated, programs, given)
        assert torch.allclose(given.results[0], 2.0 * given.args[0] + given.args[1])
    assert list(programs.values()) == [None]


def unaligned(rows: int = 8) -> Call:
    given = call(rows)
    x = torch.randn(rows * 4 + 1)[1:].view(rows, 4)
    assert x.data_ptr() % 16
    return given._replace(args=(x, given.args[1]))


def strided(rows: int = 8) -> Call:
    given = call(rows)
    return given._replace(args=(torch.randn(rows, 8)[:, ::2], given.args[1]))


def twice(rows: int = 8) -> Call:
    given = call(rows)
    return given._replace(args=(given.args[1], given.args[1]))


@pytest.mark.parametrize("make", [unaligned, strided, twice])
def test_tensors_that_may_be_copied_or_mistaken_go_to_the_library(make: Callable[[], Call]) -> None:
    names = library()
    repeated, programs = Repeated(names["attend"]), no_programs(None)
    run(repeated, programs, call())
    asked = len(names["calls"])
    for n in range(1, 4):
        given = make()
        run(repeated, programs, given)
        assert torch.allclose(given.results[0], 2.0 * given.args[0] + given.args[1])
        assert len(names["calls"]) == asked + n


def test_a_try_that_fails_leaves_the_library() -> None:
    names = library()

    def example() -> Call:
        raise RuntimeError("out of memory")

    repeated, programs = Repeated(names["attend"]), no_programs(None)
    for _ in range(3):
        given = call()
        run(repeated, programs, given, example)
        assert torch.allclose(given.results[0], 2.0 * given.args[0] + given.args[1])
    assert len(names["calls"]) == 3


def test_an_error_of_the_library_is_the_callers() -> None:
    names = library(before='raise RuntimeError("no such kernel")')
    repeated, programs = Repeated(names["attend"]), no_programs(None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such kernel"):
            run(repeated, programs, call())
    assert not programs


def test_what_is_made_is_lent(monkeypatch) -> None:
    streams: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    names = library()
    repeated, programs = Repeated(names["attend"]), no_programs(None)
    lender = Lender("owner", "user")
    with lender:
        run(repeated, programs, call())  # and its try in small
    assert streams and streams == ["owner", "user"] * (len(streams) // 2) and all(programs.values())
    streams.clear()
    with lender:
        run(repeated, programs, call())
    assert streams == ["owner", "user"] * 2 and len(names["calls"]) == 3


def test_the_library_is_left_as_it_is() -> None:
    names = library()
    before = dict(names)
    check(names, 3)
    assert before == {name: names[name] for name in before}
    given = call()
    names["attend"](*given.args, **given.kwargs)
    assert torch.allclose(given.results[0], 2.0 * given.args[0] + given.args[1])


def test_what_is_no_plain_function_is_called() -> None:
    called = []

    class Function:
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            called.append(kwargs["factor"])

    programs = no_programs(None)
    for _ in range(2):
        run(Repeated(Function()), programs, call())
    assert called == [2.0, 2.0] and not programs
