# SPDX-License-Identifier: Apache-2.0
"""From which size on rows move, and what that is predicted to save.

    python benchmarks/when_rows_move.py [--profile FILE] [--save FILE]

Two ranks, one with a single document and one with sixteen of a sixteenth of its length, in models as wide and deep as
Llama-3.2-1B (2048, 16 layers, feed-forward 8192, 32/8 heads of 64) and Llama-3-8B (4096, 32 layers, 14336, 32/8 heads
of 128). Everything is predicted by the cost model, nothing measured: by the shipped one of an H200, or by the file of
a profile. Of a layer's phase "plain" is the time with every row at home: the linear layers' matrix products and
attention on the busiest rank. "Moved" is the device's time with balance and its transfers, "host" what the host takes
for such a layer. Rows move where the later of the two, with the layer's part of the search for the plan, saves at
least `min_gain` of plain. "Gain" is what is left, of both phases; a step has more in it.
"""

from __future__ import annotations

import argparse
import datetime
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE
from deepspeed_distca.layout import Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Profile, Setting, choose
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.worth import PlanOptions, Worth

H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
MODELS = (
    SimpleNamespace(
        hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8
    ),
    SimpleNamespace(
        hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
    ),
)
TOKENS = tuple(1024 * 2**i for i in range(2, 7))
COLUMNS = (
    "width",
    "tokens",
    *(f"{phase}: {what}" for phase in PHASES for what in ("plain", "moved", "host", "moves")),
    "gain",
)


def row(model: SimpleNamespace, tokens: int, given: CostModel | None) -> tuple[str, ...]:
    """One line of the table."""
    query, key_value = model.num_attention_heads, model.num_key_value_heads
    heads = Heads(query, key_value, model.hidden_size // query)
    cost = given.for_heads(heads) if given else choose(H200, heads, folder=None).cost
    options = PlanOptions(TOLERANCE, GRANULARITY, min_gain=MIN_GAIN, linear_flops=linear_flops(model))
    layout = Layout.from_lengths([[tokens], [tokens // 16] * 16])
    cells, left, whole = [], 0.0, 0.0
    for phase in PHASES:
        worth = Worth(layout, None, phase, cost, options, early=True, layers=model.num_hidden_layers)
        # What balance would do at any price.
        freely = Worth(layout, None, phase, cost, replace(options, min_gain=0.0), early=True)
        _, spread = freely.spread(RouteCompiler(layout, worth.home.rows))
        device, host = worth.moved(worth.seconds(spread), int(spread.messages(phase).max()))
        moves = worth.spread(RouteCompiler(layout, worth.home.rows))[1].moves_rows
        cells += [*(f"{seconds * 1e3:.2f}" for seconds in (worth.whole, device, host)), "yes" if moves else "no"]
        left, whole = left + moves * (worth.whole - max(device, host)), whole + worth.whole
    return str(model.hidden_size), f"{tokens:,}", *cells, f"{left / whole:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="of `ds_distca profile`, in place of the shipped one")
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    args = parser.parse_args()
    cost = Profile.load(args.profile).cost if args.profile else None
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row(model, tokens, cost) for model in MODELS for tokens in TOKENS)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    print(table)
    if args.save:
        about = f"Predicted, by `benchmarks/when_rows_move.py` on {datetime.date.today().isoformat()}."
        args.save.write_text(f"{about} {__doc__.split('FILE]')[2].strip()}\n\nMilliseconds of a layer:\n\n{table}\n")


if __name__ == "__main__":
    main()
