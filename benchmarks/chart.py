# SPDX-License-Identifier: Apache-2.0
"""The README's chart, from the two results of ``whole_model.py``:

    python benchmarks/chart.py results/whole_model_2xh200_plain.json results/whole_model_2xh200_plugin.json out.svg

Bars are seconds of a step, without and with the plugin; the two length distributions are sums over their batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

#: What a chart calls the batches.
GROUPS = {
    "long|short": "one document of 64K\nbeside 16 of 4K",
    "pretrain": "{n} batches of\nPretrain lengths",
    "prolong": "{n} batches of\nProLong lengths",
    "even": "one document of 64K\non every rank",
}
PLAIN, PLUGIN, INK = "#b9bec6", "#1f77b4", "#24292f"


def sums(steps: dict[str, list[dict]]) -> dict[str, tuple[float, int]]:
    """By group, seconds of one pass over its batches (the median of each), and how many there are."""
    out: dict[str, tuple[float, int]] = {}
    for name, runs in steps.items():
        if not runs:
            continue
        group = name.split("#")[0]
        seconds, count = out.get(group, (0.0, 0))
        out[group] = seconds + median(run["ms"] for run in runs) / 1e3, count + 1
    return out


def main() -> None:
    plain, plugin = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    before, after = sums(plain["steps"]), sums(plugin["steps"])
    groups = [group for group in GROUPS if group in before and group in after]
    plt.rcParams.update({"font.size": 11, "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(figsize=(8.4, 3.6))
    for at, group in enumerate(groups):
        count = before[group][1]
        one, two = before[group][0] / count, after[group][0] / count
        for offset, seconds, color in ((-0.2, one, PLAIN), (0.2, two, PLUGIN)):
            axes.bar(at + offset, seconds, 0.36, color=color)
            axes.text(at + offset, seconds + 0.15, f"{seconds:.1f} s", ha="center", va="bottom", fontsize=10)
        axes.text(at, max(one, two) + 1.5, f"{one / two:.2f}x", ha="center", fontsize=13, weight="bold")
    axes.set_xticks(range(len(groups)), [GROUPS[g].format(n=before[g][1]) for g in groups])
    axes.set_ylabel("seconds a step (mean over batches)")
    axes.set_ylim(0, max(before[g][0] / before[g][1] for g in groups) + 3.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    about = plain["about"]
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (PLAIN, PLUGIN)]
    names = ["DeepSpeed", "DeepSpeed + deepspeed_distca"]
    axes.legend(handles, names, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0)
    figure.suptitle(
        f"Llama-3-8B, ZeRO-3, {about['tokens'] // 1024}K tokens a GPU, {about['ranks']}x {about['device']}, "
        f"{about['date']}",
        x=0.99,
        ha="right",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(sys.argv[3], metadata={"Date": None})


if __name__ == "__main__":
    main()
