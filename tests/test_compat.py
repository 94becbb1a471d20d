# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries that are not public: that each does what compat says of it, that one which is gone is told
at attach, and that nothing else in the package uses any."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import deepspeed
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import deepspeed_distca
from deepspeed_distca import compat
from deepspeed_distca.attention_server.exchange.peer_copy import opening
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


def recomputation_is_over() -> None:
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.sin().exp()
        except Exception as error:
            seen.append(compat_torch.recomputation_is_over(error))
            raise

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert [*seen, compat_torch.recomputation_is_over(ValueError())] == [True, False]


def in_checkpoint() -> None:
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append((compat_torch.in_backward(), compat_torch.in_checkpoint()))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for reentrant in (True, False):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    deepspeed.checkpointing.non_reentrant_checkpoint(layer, x).sum().backward()
    layer(x)
    with torch.autograd.graph.save_on_cpu():
        layer(x)
    first, again = (False, True), (True, False)
    assert seen == [first, again] * 3 + [(False, False)] * 2


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


def peer_memory() -> None:
    """How torch is asked, where there is no GPU; tests/gpu has real copies."""
    memory, views = torch.zeros(8, dtype=torch.uint8), [torch.zeros(1), torch.ones(1)]
    handle, group = mock.Mock(), mock.Mock()
    handle.get_buffer.side_effect = lambda peer, shape, dtype: views[peer]
    group.size.return_value = 2
    switches = []

    def rendezvous(*given: Any) -> mock.Mock:
        assert given == (memory, group)
        switches.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        return handle

    allocate = "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p"
    with mock.patch(allocate, return_value=memory) as allocated:
        assert compat_torch.shareable_memory(8, torch.device("cpu")) is memory
    allocated.assert_called_once_with((8,), (1,), torch.uint8, torch.device("cpu"))
    with mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous):
        assert compat_torch.share_memory(memory, group) == (handle, views)
    assert handle.get_buffer.call_args_list == [mock.call(peer, (8,), torch.uint8) for peer in (0, 1)]
    assert switches == ["1"]


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


def own_loss_function() -> None:
    sizes = {"hidden_size": 8, "vocab_size": 4, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, intermediate_size=8))
    assert compat_transformers.own_loss_function(model) is None
    model.loss_function = nn.functional.cross_entropy
    assert compat_transformers.own_loss_function(model) is nn.functional.cross_entropy


def row_numbers() -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    assert compat_datasets.row_numbers(data) is None
    assert compat_datasets.row_numbers(data.select([2, 0])).to_pylist() == [2, 0]


def is_split_by_node() -> None:
    stream = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3]]}).to_iterable_dataset()
    divided = split_dataset_by_node(stream.shuffle(seed=1), 0, 3).map(dict)
    assert not compat_datasets.is_split_by_node(stream) and compat_datasets.is_split_by_node(divided)


#: What a process of its own found, by function (see compat_worker.py).
FOUND = {
    "default_store": "said",
    "sequence_parallel_size": 1,
    "show_in_config": True,
    "forget_trace": [True, False],
    "counts_gradients": [True, False],
    "gradients_to_come": [1, 0],
    "set_gradients_to_come": 5,
    "is_count": 1,
    "own_schedule": ["BackwardPass", "ForwardPass"],
    "replace_schedule": ["TrainSchedule", "batch", "forward in buffer 0", "TrainSchedule", "forward in buffer 0"],
    "schedule_is_replaced": [False, True, False],
    "replace_next_batch": 1,
    "restore_schedule": [],
    "buffer_of": [0, 1, 0, 1],
    "has_stage": [False, True, True, False],
}


TRIED: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        in_backward,
        after_backward,
        saved_tensor_hooks,
        in_checkpoint,
        recomputation_is_over,
        without_modes,
        version_of,
        buffers,
        copy_on_host,
        attention_name,
        can_choose_attention,
        has_recurrent_state,
        own_loss_function,
        row_numbers,
        is_split_by_node,
    )
} | {
    "set_attention_name": attention_name,
    "flash_attention_forward": flash_attention,
    "flash_attention_backward": flash_attention,
    "shareable_memory": peer_memory,
    "share_memory": peer_memory,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks("tests.compat_worker:run", 1)[0]


@pytest.mark.parametrize("name", TRIED)
def test_does_what_it_says(name):
    TRIED[name]()


@pytest.mark.quick
@pytest.mark.parametrize("name", FOUND)
def test_does_what_it_says_of_engines(name, found):
    assert found[name] == FOUND[name]


def test_every_function_is_tried():
    assert {*TRIED, *FOUND} == {function.__name__ for function, _ in compat.functions()}


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
    compat.check("engine", "zero_3", "ping_pong_zero_3", "torch_varlen", "datasets")


def test_peer_copies_are_not_had_where_a_name_is_gone(monkeypatch):
    take_away(monkeypatch, "torch.distributed._symmetric_memory", "rendezvous")
    monkeypatch.setattr(opening, "CudaStreams", lambda device: None)
    monkeypatch.setattr(opening, "gather", lambda group, device, mine: [mine])
    monkeypatch.setattr(opening.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(opening.dist, "get_world_size", lambda group: 1)
    exchange, problem = opening.open_peer_copies(None, torch.device("cpu"), 1 << 20, 1.0)
    assert exchange is None
    assert problem.startswith(f"rank 0: CompatError: torch {torch.__version__} has no")


class Engine:
    """As much of an engine as attach() may look at before it has asked for what it needs."""

    def __init__(self, **block: Any) -> None:
        self.config = {"distca": block}

    def zero_optimization_stage(self) -> int:
        return 3


class Pipeline(Engine, PipelineEngine):
    def __init__(self) -> None:
        object.__setattr__(self, "config", {"distca": {}})
        object.__setattr__(self, "distca", None)


@pytest.mark.parametrize(
    ("engine", "owner", "name"),
    [
        (lambda: Engine(), "torch._C", "_current_graph_task_id"),
        (
            lambda: Engine(),
            "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator",
            "_invalidate_trace",
        ),
        (lambda: Pipeline(), "deepspeed.runtime.pipe.schedule.PipeSchedule", "_buffer_idx"),
    ],
)
def test_attach_raises_before_anything_else(engine, owner, name, monkeypatch):
    take_away(monkeypatch, owner, name)
    with pytest.raises(CompatError, match=name):
        deepspeed_distca.attach(engine())


def test_attach_misses_what_only_instances_have(monkeypatch):
    own, text = SourceFileLoader.get_source, "ds_grads_remaining"
    monkeypatch.setattr(SourceFileLoader, "get_source", lambda self, name: own(self, name).replace(text, "renamed"))
    with pytest.raises(CompatError, match=re.escape(text)):
        deepspeed_distca.attach(Engine(overlap="ping_pong"))


# -- nothing else has any

#: Not public by their looks alone: two of Python's own, and those of named tuples.
DOCUMENTED = {"os._exit", "sys._current_frames", "_asdict", "_fields", "_replace"}
#: Of another object of the same class, or of the same file.
OWN = {"copies.py: other._rings", "statistics.py: self._exchange._timed"}
#: flash-attention has no other functions; each of its versions has a file of its own.
LIBRARIES = re.compile(r"flash_attention_\d\.py: (self\._library\.)?_flash_attn_\w+")
#: What compat's names end in, whether it begins with an underscore or not.
WORDS = {re.findall(r"\w*[a-z]\w*", name)[-1] for _, noted in compat.functions() for name in noted.names}


@cache
def defined() -> frozenset[str]:
    """Names that the package gives to something of its own."""
    found = set()
    for node in (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _of_self(node):
            found.add(node.attr)
    return frozenset(found)


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_of_others(code: str) -> Iterator[str]:
    """What some code uses that is neither public nor the package's own."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            private = re.match(r"_[^_]", node.attr) or node.attr in WORDS
            if private and not (_of_self(node) and node.attr in defined()):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            private = re.fullmatch(r"_(?!_|distca)\w+", node.value) or node.value in WORDS
            if private and node.value not in defined():
                yield node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            paths = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(re.search(r"(^|\.)_[^_]", path) for path in paths):
                yield ast.unparse(node)


def test_nothing_else_uses_what_is_not_public():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "compat":
            continue
        for name in names_of_others(path.read_text()):
            place = f"{path.name}: {name}"
            documented = name in DOCUMENTED or name.rpartition(".")[2] in DOCUMENTED
            if not documented and place not in OWN and not LIBRARIES.fullmatch(place):
                found.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert not found, "use a function of deepspeed_distca.compat, or add one"


@pytest.mark.parametrize(
    "code",
    [
        "engine._config.distca_config = 1",
        "self._buffer_idx(0)",
        "torch.ops.aten._flash_attention_forward(q)",
        'getattr(model, "_is_stateful", False)',
        'setattr(module, "ds_grads_remaining", 0)',
        "engine.optimizer.parameter_offload",
        "from torch._C import _autograd",
        "from torch.utils import _pytree",
        "import torch.distributed._symmetric_memory as memory",
    ],
)
def test_the_rule_finds(code):
    assert list(names_of_others(code))


def test_compat_imports_nothing_of_the_package():
    for path in (PACKAGE / "compat").glob("*.py"):
        imported = re.findall(r"from (deepspeed_distca\S*) import|import (deepspeed_distca\S*)", path.read_text())
        assert {"".join(names) for names in imported} <= {"deepspeed_distca.compat"}
