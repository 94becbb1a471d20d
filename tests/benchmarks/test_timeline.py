# SPDX-License-Identifier: Apache-2.0
"""benchmarks/timeline.py finds a layer's attention in traces of several ranks, and draws it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT, run_program

sys.path.append(str(ROOT / "benchmarks"))
import timeline

FORWARD, BACKWARD = "kernel_flash_fwd_sm90", "kernel_flash_bwd_sm90"


def kernel(name: str, stream: int, start: float, duration: float, category: str = "kernel") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def trace(path: Path, late: float) -> Path:
    """Two layers of each phase on stream 7, attention of the workspace beside it on stream 9, a copy on stream 11."""
    events = [{"ph": "X", "cat": "cpu_op", "name": FORWARD, "ts": 0, "dur": 1e6}]
    for layer, name in enumerate([FORWARD, FORWARD, BACKWARD, BACKWARD]):
        at = 1000.0 * layer + late
        events += [
            kernel("nvjet_gemm", 7, at, 400),
            kernel("Memcpy PtoP", 11, at + 410, 20, "gpu_memcpy"),
            kernel(name, 7, at + 400, 300),
            kernel(name, 9, at + 430, 100),
            kernel("flash_bwd_postprocess", 9, at + 530, 300),
        ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_layers_attention_is_found_over_all_ranks(tmp_path: Path) -> None:
    ranks = [timeline.read(trace(tmp_path / f"{late}.json", late)) for late in (0.0, 50.0)]
    assert [len(spans) for spans in ranks] == [20, 20]
    for phase, first in (("forward", 0), ("backward", 2000)):
        for layer in (0, 1):
            low, high = timeline.window(ranks, phase, layer)
            at = first + 1000 * layer
            margin = timeline.MARGIN * 350  # from the early rank's start to the late one's end
            assert (low, high) == pytest.approx((at + 400 - margin, at + 750 + margin))
    with pytest.raises(ValueError, match="layer 2 of forward"):
        timeline.window(ranks, "forward", 2)


def test_the_picture_is_saved_and_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/timeline.py", "--save", str(tmp_path / "t.png")]
    paths = [str(trace(tmp_path / f"{rank}.json", 10.0 * rank)) for rank in range(2)]
    assert run_program([*command, *paths]).returncode == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"traceEvents": []}))
    refused = run_program([*command, empty])
    assert refused.returncode == 2 and "nothing of a GPU" in refused.stdout
