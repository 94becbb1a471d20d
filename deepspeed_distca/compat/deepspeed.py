# SPDX-License-Identifier: Apache-2.0
"""What is not public of DeepSpeed. Public by name and used as they are: engines' and grids' methods and attributes
without an underscore, and the pipeline instructions and schedules that its documentation invites to extend."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed_distca.compat import private

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import PipeSchedule

_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_ENGINE = "deepspeed.runtime.pipe.engine.PipelineEngine"
_COUNT = "ds_grads_remaining"


def import_quietly() -> None:
    """Imports it. At import it warns on standard output that it found no accelerator: among what `ds_distca --json`
    prints that would be no JSON. A script that imports DeepSpeed first sees all it has to say."""
    if "deepspeed" in sys.modules:
        return
    with quietly():
        importlib.import_module("deepspeed")


@contextmanager
def quietly() -> Iterator[None]:
    """What libraries warn of is not logged."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@private("deepspeed.utils.groups._get_sequence_parallel_world_size")
def sequence_parallel_size() -> int:
    """Ranks that share a sequence by Ulysses or ALST, 1 where nobody does. Needs torch.distributed. Engines know it
    only by the configuration, which an ``mpu`` can go round."""
    from deepspeed.utils import groups

    return groups._get_sequence_parallel_world_size()


@private("deepspeed.runtime.engine: self._config = ")
def show_in_config(engine: DeepSpeedEngine, name: str, value: object) -> None:
    """Has DeepSpeed's dump of an engine's configuration show something more. It has no block for others' options."""
    setattr(engine._config, name, value)


@private(
    "deepspeed.runtime.zero.stage3: self.parameter_offload = ",
    f"{_OFFLOAD}.DeepSpeedZeRoOffload.get_param_coordinator",
    f"{_COORDINATOR}.is_invalid_trace",
    f"{_COORDINATOR}._invalidate_trace",
    need="zero_3",
)
def forget_trace(engine: DeepSpeedEngine) -> None:
    """ZeRO-3 records the order in which a step's modules fetch parameters, and expects the next step to keep it: has
    it begin anew. Other stages record nothing. It has no public switch, and forgets by itself only with a warning."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    coordinator = None if offload is None else offload.get_param_coordinator()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


@private(f"{_OFFLOAD}: {_COUNT}", f"{_OFFLOAD}: .post_bwd_fn = ", need="ping_pong_zero_3")
def counts_gradients(module: nn.Module) -> bool:
    """Whether ZeRO-3 counts the gradients of a module's inputs in backward, to know when its parameters can go."""
    return hasattr(module, _COUNT) or hasattr(module, "post_bwd_fn")


@private(f"{_OFFLOAD}: module.{_COUNT} = 0", need="ping_pong_zero_3")
def gradients_to_come(module: nn.Module) -> int:
    """How many gradients ZeRO-3 still waits for in a module's backward. The count is a bare attribute of modules."""
    return module.__dict__.get(_COUNT, 0)


@private(f"{_OFFLOAD}: ctx.module.{_COUNT} == 0", need="ping_pong_zero_3")
def set_gradients_to_come(module: nn.Module, count: int) -> None:
    """Changes :func:`gradients_to_come`. ZeRO-3 has no notion of a module that is called twice before its backward."""
    setattr(module, _COUNT, count)


@private(f"{_OFFLOAD}: module.{_COUNT}")
def is_count(attribute: str) -> bool:
    """Whether a module's attribute of this name is DeepSpeed's, which counts its hooks' calls in some."""
    return attribute.startswith("ds_")


@private(f"{_ENGINE}._exec_schedule", f"{_ENGINE}._INSTRUCTION_MAP", need="pipeline")
def own_schedule(engine: PipelineEngine) -> tuple[Callable[[PipeSchedule], None], dict[type, Callable]]:
    """How an engine runs a schedule, and the function for each of its instructions. DeepSpeed's schedules can be
    extended, but its engines are not to be told of it by public means."""
    return engine._exec_schedule, dict(engine._INSTRUCTION_MAP)


@private(f"{_ENGINE}._exec_schedule", f"{_ENGINE}._INSTRUCTION_MAP", need="pipeline")
def replace_schedule(
    engine: PipelineEngine, run: Callable[[PipeSchedule], None], instructions: dict[type, Callable]
) -> None:
    """Has this engine alone do otherwise what :func:`own_schedule` tells."""
    engine._exec_schedule, engine._INSTRUCTION_MAP = run, instructions


@private(f"{_ENGINE}._exec_schedule", need="pipeline")
def schedule_is_replaced(engine: PipelineEngine) -> bool:
    """Whether somebody has replaced how this engine runs a schedule."""
    return not isinstance(engine._exec_schedule, MethodType)


@private(f"{_ENGINE}._next_batch", need="pipeline")
def replace_next_batch(engine: PipelineEngine, next_batch: Callable[[], Any] | None) -> None:
    """Where this engine alone takes its next micro-batch from; None: from its own loader again. The public
    ``set_batch_fn`` changes a micro-batch when it is loaded, and cannot load all of them before the first."""
    if next_batch is None:
        engine.__dict__.pop("_next_batch", None)
    else:
        engine._next_batch = next_batch


@private(f"{_ENGINE}._exec_schedule", f"{_ENGINE}._INSTRUCTION_MAP", f"{_ENGINE}._next_batch", need="pipeline")
def restore_schedule(engine: PipelineEngine) -> None:
    """Gives an engine its own methods back."""
    for name in ("_exec_schedule", "_INSTRUCTION_MAP", "_next_batch"):
        engine.__dict__.pop(name, None)


@private("deepspeed.runtime.pipe.schedule.PipeSchedule._buffer_idx", need="pipeline")
def buffer_of(schedule: PipeSchedule, micro_batch: int) -> int:
    """The number of a micro-batch's buffer. For subclasses of PipeSchedule, to which DeepSpeed gives no other name."""
    return schedule._buffer_idx(micro_batch)


@private("deepspeed.runtime.pipe.schedule.PipeSchedule._valid_stage", need="pipeline")
def has_stage(schedule: PipeSchedule, stage: int) -> bool:
    """Whether a pipeline has a stage of that number. For subclasses of PipeSchedule, as :func:`buffer_of`."""
    return schedule._valid_stage(stage)
