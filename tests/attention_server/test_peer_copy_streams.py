# SPDX-License-Identifier: Apache-2.0
"""Where streams of the driver are refused, so that another exchange is used."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.attention_server.exchange.peer_copy.streams import CudaStreams, DriverError


@pytest.mark.parametrize("connections", ["1", "7"])
def test_too_few_connections_are_refused(monkeypatch, connections: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with pytest.raises(DriverError, match=f"CUDA_DEVICE_MAX_CONNECTIONS={connections} .* set 8 or more"):
        CudaStreams(torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a driver")
@pytest.mark.parametrize("connections", [None, "8", "32"])
def test_a_machine_without_a_driver_is_refused(monkeypatch, connections: str | None) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with pytest.raises(DriverError, match="lacks stream memory operations"):
        CudaStreams(torch.device("cuda", 0))
