# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: compiled models, tiled layers and losses, PEFT's adapters, Accelerate's parallelism and a
vision-language model's text, with the block against without it."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.huggingface.compared import (
    STEPS,
    Run,
    apart,
    compared,
    config_of,
    end,
    go_on,
    models_loss,
    outcomes,
    start,
    trained,
    wanted,
)
from tests.tiny_llama import SIZES, llama

TASK = TaskType.CAUSAL_LM


# -- torch and DeepSpeed's tiles ----------------------------------------------------------------------------------


def engine_compile(folder: Path) -> dict[str, Any]:
    """Rows of other lengths and other plans in every step; how many graphs were made up to each of them."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    steps = [*STEPS, [[77, 3], [12]], [[5, 6], [90, 8]]]
    engine = start(llama, config_of(True))
    engine.compile(backend="aot_eager", compile_kwargs={"dynamic": True})
    run, graphs = Run(), []
    for step in steps:
        go_on(engine, run, [step])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    end(engine)
    return {**apart(run, trained(llama, config_of(False), steps)), "graphs": graphs}


def tiled_mlp(folder: Path, stage: int) -> dict[str, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        parameters = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(type(self).forward, self, x, 4, parameters)

    def build() -> torch.nn.Module:
        model = llama()
        for layer in model.model.layers:
            layer.mlp.forward = types.MethodType(forward, layer.mlp)
        return model

    return apart(trained(build, config_of(True, stage)), wanted())


class TiledLlama(LlamaForCausalLM):
    """Its loss is made from hidden states by pieces of the row, with DeepSpeed's function. That computes the head's
    gradient in forward, so what the loss is divided by belongs inside."""

    reads_count = True

    def forward(self, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **given: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **given).last_hidden_state
        if labels is None:
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        count = num_items_in_batch if self.reads_count else None
        if count is None:
            count = (targets != -100).sum()

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(model.lm_head(x), y, reduction="sum", ignore_index=-100) / count

        made = TiledFusedLogitsLoss.apply(loss, self, hidden, targets, None, 4, [self.lm_head.weight], "sum")
        return CausalLMOutputWithPast(loss=made)


class TiledMeanLlama(TiledLlama):
    """Its loss is the mean over its own targets, whatever it is told."""

    reads_count = False


def tiled_loss(folder: Path, model: type, stage: int, accumulation: int = 1) -> dict[str, Any]:
    config = config_of(True, stage, gradient_accumulation_steps=accumulation)
    return apart(trained(lambda: llama(model), config), wanted())


# -- PEFT ---------------------------------------------------------------------------------------------------------


def adapter(folder: Path, config: Any) -> dict[str, Any]:
    def build() -> torch.nn.Module:
        model = llama()
        torch.manual_seed(1)
        return get_peft_model(model, config)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of position ids that it does not pass on
        return compared(build, 1)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type=TASK, **options)


class Around(torch.nn.Module):
    """Makes a loss of its own from hidden states, of the part of a model that gives them, under checkpointing."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()

    def forward(self, labels: Any, num_items_in_batch: Any = None, **given: Any) -> Any:
        hidden = self.model.model(**given).last_hidden_state
        return CausalLMOutputWithPast(loss=cross_entropy(self.model.lm_head(hidden)[0, :-1], labels[0, 1:]))


class Packing(torch.nn.Linear):
    """A linear layer of whole numbers, as bitsandbytes' 4-bit ones on CPUs: the first forward in evaluation packs it
    another way, from where on it gives no gradients."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = float(linear.weight.detach().abs().max()) / 127
        whole = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(whole, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training or x.requires_grad):
            self.weight.packed = True  # kept by the parameter, as bitsandbytes does
        made = torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)
        return made.detach() if hasattr(self.weight, "packed") else made


def packing(folder: Path) -> dict[str, Any]:
    def build() -> torch.nn.Module:
        model = llama()
        for layer in model.model.layers:
            layer.mlp.up_proj = Packing(layer.mlp.up_proj)
        return model

    return compared(build, 1)


def qlora(folder: Path) -> dict[str, Any]:
    if dist.get_rank() == 0:
        llama(hidden_size=64, intermediate_size=64).save_pretrained(folder / "model")
    dist.barrier()

    def build() -> torch.nn.Module:
        to_4_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", quantization_config=to_4_bits, device_map={"": "cpu"}, use_cache=False
        )
        torch.manual_seed(1)
        return get_peft_model(model, lora())

    return compared(build, 1)


# -- Accelerate ---------------------------------------------------------------------------------------------------


def parallelism(folder: Path, **sizes: Any) -> dict[str, Any]:
    """An engine that Accelerate prepares; what it does is compared with plain training."""
    states = (AcceleratorState, GradientState, PartialState)
    try:
        PartialState(backend="gloo")
        plugin = DeepSpeedPlugin(hf_ds_config=config_of(True, 1))
        accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))
        engine = accelerator.prepare(llama())
        engine.train()
        outcome = apart(go_on(engine, Run(), STEPS), wanted())
        end(engine)
        return outcome
    finally:
        for state in states:
            state._shared_state.clear()


ULYSSES = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")


# -- models -------------------------------------------------------------------------------------------------------


def qwen() -> torch.nn.Module:
    """Qwen2.5-VL with its rotary embeddings of three axes."""
    text = dict(
        **SIZES,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]),
    )
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=2)
    special = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "fullatt_block_indexes": [0]}, **special)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.model.visual.requires_grad_(False)  # no images
    return model


def text_of_qwen(folder: Path, axes: int, described: bool = False) -> dict[str, Any]:
    """Text alone, with position ids of so many axes; `described`: beside cu_seqlens. Without the block four, by which
    transformers finds documents."""

    def forward(engine: Any, batch: dict[str, Any]) -> torch.Tensor:
        positions, given = batch["position_ids"], dict(batch)
        count = axes if hasattr(engine, "distca") else 4
        if count > 1:
            given["position_ids"] = positions[None].expand(count, -1, -1)
        if described and hasattr(engine, "distca"):
            given["cu_seqlens"] = [*torch.nonzero(positions[0] == 0)[:, 0].tolist(), positions.shape[1]]
        return models_loss(engine, given)

    return compared(qwen, 0, forward, optimizer={"type": "SGD", "params": {"lr": 0.1}})


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "engine.compile": engine_compile,
    "TiledMLP, ZeRO-1": functools.partial(tiled_mlp, stage=1),
    "TiledMLP, ZeRO-3": functools.partial(tiled_mlp, stage=3),
    "tiled loss, ZeRO-0": functools.partial(tiled_loss, model=TiledLlama, stage=0),
    "tiled loss, ZeRO-3": functools.partial(tiled_loss, model=TiledLlama, stage=3),
    "tiled mean, ZeRO-0": functools.partial(tiled_loss, model=TiledMeanLlama, stage=0),
    "tiled mean, ZeRO-3": functools.partial(tiled_loss, model=TiledMeanLlama, stage=3),
    "tiled loss, two micro-batches": functools.partial(tiled_loss, model=TiledLlama, stage=1, accumulation=2),
    "DoRA": functools.partial(adapter, config=lora(use_dora=True)),
    "IA3": functools.partial(
        adapter,
        config=IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
            task_type=TASK,
        ),
    ),
    "prompt tuning": functools.partial(adapter, config=PromptTuningConfig(num_virtual_tokens=5, task_type=TASK)),
    "p-tuning": functools.partial(
        adapter, config=PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=32, task_type=TASK)
    ),
    "prefix tuning": functools.partial(adapter, config=PrefixTuningConfig(num_virtual_tokens=5, task_type=TASK)),
    "AdaLoRA": functools.partial(
        adapter,
        config=AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=1, total_step=9, target_modules=["q_proj"], task_type=TASK
        ),
    ),
    "adaption prompt": functools.partial(
        adapter, config=AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type=TASK)
    ),
    "a part alone": lambda folder: compared(lambda: Around(llama())),
    "packed for evaluation": packing,
    "tp_size": functools.partial(parallelism, tp_size=2),
    "cp_size": functools.partial(parallelism, cp_size=2),
    "dp_shard_size": functools.partial(parallelism, dp_shard_size=2),
    "Qwen2.5-VL, one axis": functools.partial(text_of_qwen, axes=1),
    "Qwen2.5-VL, four axes": functools.partial(text_of_qwen, axes=4),
    "Qwen2.5-VL, three axes": functools.partial(text_of_qwen, axes=3),
    "Qwen2.5-VL, three axes and cu_seqlens": functools.partial(text_of_qwen, axes=3, described=True),
    # The last: DeepSpeed keeps its groups for as long as the process lives.
    "sp_size": functools.partial(parallelism, sp_size=2, sp_backend="deepspeed", sp_handler=ULYSSES),
}


def run(folder: str, only: list[str] | None = None) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    scenarios = {**SCENARIOS, "QLoRA": qlora} if only else SCENARIOS
    chosen = {n: s for n, s in scenarios.items() if not only or n in only}
    return outcomes({name: functools.partial(scenario, Path(folder)) for name, scenario in chosen.items()})
