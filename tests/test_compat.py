# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries that are not public: that each does what compat says of it, that one which is gone is told
at attach, and that nothing else in the package uses any."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import deepspeed_distca
from deepspeed_distca import compat
from deepspeed_distca.compat import CompatError
from deepspeed_distca.compat import datasets as compat_datasets
from deepspeed_distca.compat import torch as compat_torch
from deepspeed_distca.compat import transformers as compat_transformers
from tests.distributed.harness import run_ranks

PACKAGE = Path(deepspeed_distca.__file__).parent


# -- each does what it says


def in_backward() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat_torch.in_backward()))
    x.sum().backward()
    assert [*seen, compat_torch.in_backward()] == [True, False]


def after_backward() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: compat_torch.after_backward(lambda: seen.append("over")))
    x.register_post_accumulate_grad_hook(lambda _: seen.append("last gradient"))
    y.sum().backward()
    assert seen == ["last gradient", "over"]


def saved_tensor_hooks() -> None:
    def pack(x: torch.Tensor) -> torch.Tensor:
        return x

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert compat_torch.saved_tensor_hooks() == (pack, unpack)
    assert compat_torch.saved_tensor_hooks() is None


def in_checkpoint() -> None:
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        if not compat_torch.in_backward():
            seen.append(compat_torch.in_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for reentrant in (True, False):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    deepspeed.checkpointing.non_reentrant_checkpoint(layer, x).sum().backward()
    layer(x)
    with torch.autograd.graph.save_on_cpu():
        layer(x)
    assert seen == [True, True, True, False, False]


def without_modes() -> None:
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    with Watching():
        with compat_torch.without_modes():
            torch.ones(2).cos()
        torch.ones(2).sin()
    assert [name for name in seen if name in ("aten::cos", "aten::sin")] == ["aten::sin"]


def version_of() -> None:
    x = torch.ones(2)
    before = compat_torch.version_of(x)
    x.add_(1)
    assert compat_torch.version_of(x) != before == compat_torch.version_of(torch.ones(2))


def buffers() -> None:
    module = nn.Module()
    module.register_buffer("none", None)
    module.register_buffer("one", torch.ones(1))
    compat_torch.buffers(module)["none"] = torch.zeros(1)
    assert sorted(compat_torch.buffers(module)) == ["none", "one"]
    assert float(module.none) == 0.0


def copy_on_host() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    calls = []
    module.register_forward_hook(lambda *_: calls.append("a hook"))
    module[0].register_forward_pre_hook(lambda *_: calls.append("a hook"))
    module.forward = lambda x: calls.append("another's forward")
    twin = compat_torch.copy_on_host(module)
    twin.train()
    twin(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    assert not calls
    assert module[0].running_mean.tolist() == [0.0, 0.0] != twin[0].running_mean.tolist()


def default_store() -> None:
    assert in_a_process()["default_store"] == "said"
    with pytest.raises((ValueError, KeyError)):
        compat_torch.default_store()


def flash_attention() -> None:
    """On no device: shapes and types of what the operators take and return."""
    q, k, v = (torch.empty(6, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    window = {"scale": 0.125, "window_size_left": -1, "window_size_right": 0}
    out, lse, state, unused, _ = compat_torch.flash_attention_forward(
        q, k, v, starts, starts, 4, 4, 0.0, True, False, **window
    )
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 6), torch.float32)
    grads = compat_torch.flash_attention_backward(
        out, q, k, v, out, lse, starts, starts, 4, 4, 0.0, True, state, unused, **window
    )
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def attention_name() -> None:
    config = LlamaConfig()
    compat_transformers.set_attention_name(config, "distca")
    assert compat_transformers.attention_name(config) == "distca"
    config = LlamaConfig(attn_implementation="eager")
    assert compat_transformers.attention_name(config) == "eager"


def can_choose_attention() -> None:
    sizes = {"hidden_size": 8, "vocab_size": 4}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    bloom = BloomForCausalLM(BloomConfig(**sizes, n_layer=1, n_head=1))
    assert [compat_transformers.can_choose_attention(model) for model in (llama, bloom)] == [True, False]


def has_recurrent_state() -> None:
    sizes = {"hidden_size": 8, "vocab_size": 4, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, intermediate_size=8))
    mamba = MambaForCausalLM(MambaConfig(**sizes, state_size=2))
    assert [compat_transformers.has_recurrent_state(model) for model in (llama, mamba)] == [False, True]


def recomputes_reentrantly() -> None:
    sizes = {"hidden_size": 8, "vocab_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    found = []
    for given in (None, True, False):
        llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8))
        if given is not None:
            llama.gradient_checkpointing_enable({"use_reentrant": given})
        found.append(any(map(compat_transformers.recomputes_reentrantly, llama.modules())))
    assert found == [False, True, False]


def row_numbers() -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    assert compat_datasets.row_numbers(data) is None
    assert compat_datasets.row_numbers(data.select([2, 0])).to_pylist() == [2, 0]


#: What a process of its own found, by function (see compat_worker.py).
FOUND = {
    "sequence_parallel_size": 1,
    "show_in_config": True,
    "forget_trace": [True, False],
    "counts_gradients": [True, False],
    "gradients_to_come": [1, 0],
    "set_gradients_to_come": 5,
    "own_schedule": ["BackwardPass", "ForwardPass"],
    "replace_schedule": ["TrainSchedule", "batch", "forward in buffer 0", "TrainSchedule", "forward in buffer 0"],
    "schedule_is_replaced": [False, True, False],
    "replace_next_batch": 1,
    "restore_schedule": [],
    "buffer_of": [0, 1, 0, 1],
    "has_stage": [False, True, True, False],
}


@cache
def in_a_process() -> dict[str, Any]:
    return run_ranks("tests.compat_worker:run", 1)[0]


def is_count() -> None:
    found = in_a_process()["is_count"]
    assert "ds_grads_remaining" in found
    assert all(name.startswith("ds_") for name in found)


TRIED: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        in_backward,
        after_backward,
        saved_tensor_hooks,
        in_checkpoint,
        without_modes,
        version_of,
        buffers,
        copy_on_host,
        default_store,
        attention_name,
        can_choose_attention,
        has_recurrent_state,
        recomputes_reentrantly,
        row_numbers,
        is_count,
    )
} | {
    "set_attention_name": attention_name,
    "flash_attention_forward": flash_attention,
    "flash_attention_backward": flash_attention,
}
#: Whose use needs GPUs: tests/gpu has peer copies between two of them.
ON_GPUS = {"shareable_memory", "share_memory"}


@pytest.mark.parametrize("name", [function.__name__ for function, _ in compat.functions()])
def test_does_what_it_says(name):
    if name in FOUND:
        assert in_a_process()[name] == FOUND[name]
    elif name in ON_GPUS:
        compat.check("peer_copy")
    else:
        TRIED[name]()


def test_an_operators_own_function():
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert compat_torch.undecorated(torch.library.custom_op("distca_test::double", double, mutates_args=())) is double
    assert compat_torch.undecorated(double) is double


# -- a name that is gone


def test_all_names_are_there():
    compat.check(*{noted.need for _, noted in compat.functions()})


def test_every_kind_of_name_can_be_missed():
    for name in ("torch.Tensor._no_such", "torch._no_such", "torch.utils._no_such.f", "torch.nn.functional: _no_such"):
        assert not compat._is_there(name)
    for name in ("torch.Tensor._version", "torch.utils._python_dispatch", "torch.nn.modules.module: _buffers"):
        assert compat._is_there(name)


GONE = [
    ("torch._C", "_current_graph_task_id", "engine", "set `distca.enabled` to false"),
    ("torch.utils._python_dispatch", "_disable_current_modes", "engine", "set `distca.enabled` to false"),
    ("transformers.PreTrainedModel", "_is_stateful", "engine", "set `distca.enabled` to false"),
    ("deepspeed.runtime.pipe.engine.PipelineEngine", "_exec_schedule", "pipeline", "set `distca.enabled` to false"),
    ("torch.distributed._symmetric_memory", "rendezvous", "peer_copy", 'set it to "nccl"'),
]


def take_away(monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    try:
        found = importlib.import_module(owner)
    except ImportError:
        module, _, cls = owner.rpartition(".")
        found = getattr(importlib.import_module(module), cls)
    monkeypatch.delattr(found, name)


@pytest.mark.parametrize(("owner", "name", "need", "remedy"), GONE)
def test_a_name_that_is_gone(owner, name, need, remedy, monkeypatch):
    take_away(monkeypatch, owner, name)
    library = owner.partition(".")[0]
    with pytest.raises(CompatError) as caught:
        compat.check(need)
    text = str(caught.value)
    version = importlib.import_module(library).__version__
    for part in (f"{library} {version} has no", f".{name}`", compat.TRIED[library][0], compat.TRIED[library][-1]):
        assert part in text
    assert text.endswith(remedy)


def test_what_nobody_asked_for_is_not_missed(monkeypatch):
    take_away(monkeypatch, "torch.distributed._symmetric_memory", "rendezvous")
    take_away(monkeypatch, "deepspeed.runtime.pipe.engine.PipelineEngine", "_exec_schedule")
    compat.check("engine", "zero_3", "ping_pong", "ping_pong_zero_3", "torch_varlen", "datasets")
