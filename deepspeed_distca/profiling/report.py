# SPDX-License-Identifier: Apache-2.0
"""What ``ds_distca profile`` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deepspeed_distca.profiling.result import LINKS, Result
from deepspeed_distca.scheduler.cost_model import PHASES


def print_result(result: Result, console: Console) -> None:
    """The calls that the model was not fitted to, the errors, and the terms."""
    setting, cost = result.profile.setting, result.profile.cost
    heads = cost.heads
    console.print(
        f"{setting.device}, {setting.kernel}, {setting.dtype}, {heads.query}/{heads.key_value} heads of "
        f"{heads.head_dim}",
        highlight=False,
    )
    table = Table(title="calls that the model was not fitted to: measured and predicted ms")
    table.add_column("queries x keys x tasks")
    for phase in PHASES:
        for name in (phase, "predicted", "error"):
            table.add_column(name, justify="right", no_wrap=True)
    for i, shape in enumerate(result.unseen.shapes):
        cells = []
        for phase in PHASES:
            measured, predicted = result.unseen.seconds[phase][i], result.predicted[phase][i]
            cells += [f"{measured * 1e3:.3f}", f"{predicted * 1e3:.3f}", f"{predicted / measured - 1:+.1%}"]
        table.add_row(shape.name, *cells)
    console.print(table)

    table = Table(title="the model")
    table.add_column("phase")
    for name in ("1M pairs", "query row", "key row", "task"):
        table.add_column(f"{name}, us", justify="right")
    for name in ("held out: median", "worst", "fitted: median", "worst"):
        table.add_column(name, justify="right")
    for phase in PHASES:
        terms, unseen, fitted = cost.phase(phase), result.held_out[phase], result.fitted[phase]
        table.add_row(
            phase,
            f"{terms.pair / 1e3:.2f}",
            f"{terms.query_row / 1e9:.5f}",
            f"{terms.key_row / 1e9:.5f}",
            f"{terms.task / 1e9:.3f}",
            *(f"{error:.1%}" for error in (unseen.median, unseen.worst, fitted.median, fitted.worst)),
        )
    console.print(table)
    console.print(f"smallest call {cost.launch / 1e9:.1f} us", highlight=False)
    console.print(f"linear layers {cost.linear_rate / 1e12:.4g} TFLOP/s", highlight=False)
    for kind, (rate, latency) in LINKS.items():
        link = f"{getattr(cost, rate) / 2**30:.1f} GiB/s each way, latency {getattr(cost, latency) / 1e9:.1f} us"
        about = result.profile.about[f"exchange {kind}"]
        console.print(f"exchange {kind} {link}: {about}", highlight=False, soft_wrap=True)
    table = Table(title="what moving rows costs beside the transfers")
    for name in ("phase", "layer, us", "message, us"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in PHASES:
        moving = cost.moving(phase)
        table.add_row(phase, f"{moving.layer / 1e9:.0f}", f"{moving.message / 1e9:.1f}")
    console.print(table)
    console.print(f"moving rows: {result.profile.about['moving rows']}", highlight=False, soft_wrap=True)
