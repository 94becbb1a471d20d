# SPDX-License-Identifier: Apache-2.0
"""Which kernel is chosen, and what is said when the wanted one cannot be."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from deepspeed_distca.attention_server.kernels import (
    KERNEL_NAMES,
    Kernel,
    KernelError,
    installed_kernels,
    make_kernel,
    select_kernel,
)
from deepspeed_distca.attention_server.kernels import libraries as libraries_module
from deepspeed_distca.attention_server.task_batch import AttentionSpec

DISTRIBUTIONS = {"flash-attn-4": "4.0.0", "flash_attn_3": "3.0.0", "flash-attn": "2.8.3"}
MODULES = {
    "flash-attn-4": "flash_attn.cute.interface",
    "flash_attn_3": "flash_attn_interface",
    "flash-attn": "flash_attn.flash_attn_interface",
}


@pytest.fixture
def machine(monkeypatch):
    """Pretends a GPU and installed distributions."""

    def pretend(capability: tuple[int, int] = (9, 0), distributions: dict[str, str] | None = None):
        versions = DISTRIBUTIONS if distributions is None else distributions

        def version(name: str) -> str:
            if name not in versions:
                raise libraries_module.importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(libraries_module.importlib.metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        for distribution in versions:
            module = MODULES[distribution]
            parts = module.split(".")
            for i in range(1, len(parts) + 1):
                name = ".".join(parts[:i])
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    return pretend


def choose(name=None, device="cuda", dtype=torch.bfloat16, heads=(32, 8), dims=(128, 128), **spec) -> str:
    return select_kernel(
        name,
        device=device,
        dtype=dtype,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        v_head_dim=dims[1],
        spec=AttentionSpec(scale=0.1, **spec),
    ).name


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_every_kernel_has_the_interface(name):
    kernel = make_kernel(name)
    assert isinstance(kernel, Kernel) and kernel.name == name
    assert kernel.grad_dtype(torch.bfloat16) == (torch.float32 if name == "reference" else torch.bfloat16)


def test_the_cpu_gets_the_reference_whatever_is_installed(machine):
    machine()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert choose(device="cpu", dtype=dtype) == "reference"


def test_order_of_preference(machine):
    expected = ["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch_varlen"]
    installed = dict(DISTRIBUTIONS)
    for name, distribution in zip(expected, [*DISTRIBUTIONS, None], strict=True):
        machine(distributions=installed)
        assert installed_kernels() == [*expected[expected.index(name) :], "reference"]
        assert choose() == name
        installed.pop(distribution, None)


def test_fp32_on_a_gpu_gets_the_reference_with_a_warning(machine, caplog):
    machine()
    with caplog.at_level(logging.WARNING):
        assert choose(dtype=torch.float32) == "reference"
    assert "slow reference kernel" in caplog.text and "torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("capability", "request_", "expected"),
    [
        ((9, 0), {"dims": (256, 256)}, "flash_attn_3"),
        ((10, 0), {"dims": (256, 256)}, "flash_attn_4"),
        ((10, 0), {"dims": (192, 192)}, "flash_attn_2"),
        ((9, 0), {"dims": (192, 128), "heads": (8, 8)}, "flash_attn_4"),
        ((9, 0), {"dims": (192, 128)}, "flash_attn_3"),
        ((9, 0), {"dims": (100, 100)}, "flash_attn_3"),
        ((9, 0), {"dims": (320, 320)}, "reference"),
        ((8, 0), {}, "flash_attn_2"),
        ((12, 0), {}, "flash_attn_2"),
        ((7, 5), {}, "reference"),
        ((9, 0), {"softcap": 30.0}, "flash_attn_4"),
        ((9, 0), {"window": 4096}, "flash_attn_4"),
    ],
)
def test_what_does_not_fit_is_passed_over(machine, capability, request_, expected):
    machine(capability)
    assert choose(**request_) == expected


def test_torch_varlen_has_no_softcap(machine):
    machine(distributions={})
    assert choose(softcap=30.0) == "reference"
    with pytest.raises(KernelError, match=r"torch_varlen: softcap 30.0; this kernel has none. Use"):
        choose("torch_varlen", softcap=30.0)


def test_named_kernels(machine):
    machine()
    for name in KERNEL_NAMES:
        assert choose(name) == name
    with pytest.raises(KernelError, match=r"unknown attention kernel 'flash'; the names are flash_attn_4, "):
        choose("flash")
    with pytest.raises(KernelError, match=r"flash_attn_2: dtype torch.float32; .* or use the kernel 'reference'"):
        choose("flash_attn_2", dtype=torch.float32)
    with pytest.raises(KernelError, match=r"flash_attn_4: device cpu; it runs on CUDA"):
        choose("flash_attn_4", device="cpu")
    with pytest.raises(KernelError, match=r"head dimensions \(320, 320\); at most 256"):
        choose("flash_attn_2", dims=(320, 320))
    with pytest.raises(KernelError, match=r"flash_attn_3: compute capability 8.0; it is used on 9.x"):
        machine((8, 0))
        choose("flash_attn_3")


def test_named_kernels_that_are_not_installed(machine):
    machine(distributions={})
    with pytest.raises(KernelError, match=r"'flash_attn_4' was asked for, but the distribution 'flash-attn-4' is not"):
        choose("flash_attn_4")
    machine(distributions={"flash-attn": "2.5.8"})
    with pytest.raises(KernelError, match=r"flash-attn 2.5.8 is installed and 2.7 or later is needed"):
        choose("flash_attn_2")
    assert choose() == "torch_varlen"


def test_a_stale_module_without_its_distribution_is_not_flash_attention_4(machine):
    """flash-attention 2 wheels carry a folder flash_attn/cute."""
    machine(distributions={"flash-attn": "2.8.3"})
    sys.modules["flash_attn.cute"] = types.ModuleType("flash_attn.cute")
    try:
        assert choose() == "flash_attn_2"
    finally:
        del sys.modules["flash_attn.cute"]


def test_a_library_that_does_not_import_is_passed_over_or_reported(machine, monkeypatch):
    machine()
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)  # makes its import raise ImportError
    assert choose() == "flash_attn_3"
    with pytest.raises(KernelError, match=r"flash_attn.cute.interface is installed but does not import \(Module"):
        choose("flash_attn_4")


def test_grouped_heads_must_divide():
    with pytest.raises(KernelError, match="no attention kernel fits: .*reference: 6 query heads over 4"):
        choose(device="cpu", heads=(6, 4))
