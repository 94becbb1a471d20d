# SPDX-License-Identifier: Apache-2.0
"""From measured rows to what is read: ideals, shares of the ideal speed-up, and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

#: Below this share of plain's time there is nothing to gain, and a share of it would be noise.
LEAST_GAIN = 0.01
PLAIN, EVENED = "plain", "evened"

NOTES = """\
Times are medians of the slowest rank's whole optimizer steps; "of plain" is a variant's time over plain's on the very
same batch. The ideal of a batch is plain's step with its attention evened out for nothing: plain's time, less the
largest over the ranks of its attention kernels' time, plus their mean. The share of the ideal is (plain - variant) /
(plain - ideal), a mean over batches; batches with less than 1 % to gain are skipped, in brackets: how many. "Of all
together" is the same of the batches' sums, none skipped. That ideal takes the rest of plain's step as it is on ranks
that wait for others, and a GPU that waits now and then runs faster afterwards. "Against evened" has an ideal that was
run: plain on other documents, with as many tokens and the mean of the ranks' attention on every rank, its largest
attention time replaced by the mean of plain's; mean over batches with 1 % to gain, and of the sums. Balance is the
largest over the mean of the servers' attention time: as planned (predicted), and measured, before in plain and after
in the variant. MiB is what a rank sends for attention in a step: mean over ranks, and the worst rank. Exposed is the
time in which a rank waits for an exchange and no attention kernel runs, on the rank where it is longest, also in % of
the step; for Ulysses it was not measured. Loss is the largest relative difference from plain's on the same batch. Peak
is the absolute `max_memory_allocated`, smallest and largest over ranks, of all batches; "left" what was allocated
before the variant's engine was built; "growth" how much more memory is reserved at the end than after the third step,
on the rank where it is most (an engine begins with two batches of large plans unless it is run with --cold)."""


class Results:
    """Everything that was measured.

    Attributes:
        about: card, versions, arguments: what a reader needs to know, JSON values.
        rows: by batch, then by variant, in the order of measurement.
        memory: by variant.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.groups: dict[str, str] = {}
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        self.memory: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []

    def add(self, group: str, batch: str, variant: str, row: dict[str, Any]) -> None:
        """Takes a row in, with what follows from it and plain's row."""
        self.groups[batch] = group
        row["measured_balance"] = _balance(row["attention_ms"])
        if row["exposed_ms"] is not None:
            row["exposed_share"] = max(row["exposed_ms"]) / row["ms"]
        rows = self.rows.setdefault(batch, {})
        rows[variant] = row
        plain = rows.get(PLAIN)
        if variant == PLAIN:
            row["ideal_ms"] = row["ms"] - max(row["attention_ms"]) + mean(row["attention_ms"])
        elif plain is not None and variant == EVENED:
            plain["evened_ms"] = row["ms"] - max(row["attention_ms"]) + mean(plain["attention_ms"])
            for name in rows.keys() - {PLAIN, EVENED}:
                rows[name]["share_of_evened"] = _share(plain, rows[name], "evened_ms")
        elif plain is not None:
            row["of_plain"] = row["ms"] / plain["ms"]
            row["share_of_ideal"] = _share(plain, row, "ideal_ms")
            row["share_of_evened"] = _share(plain, row, "evened_ms")
            row["loss_difference"] = abs(row["loss"] - plain["loss"]) / abs(plain["loss"])

    def save_json(self, path: Path) -> None:
        """Rewrites the file; a reader never sees half of it."""
        everything = {**self.about, "notes": self.notes, "memory": self.memory, "batches": self.rows}
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(everything))
        part.replace(path)

    def line(self, batch: str, variant: str) -> str:
        """One row for the screen."""
        row = self.rows[batch][variant]
        text = f"{batch:24s} {variant:24s} {row['ms']:9.1f} ms"
        if "ideal_ms" in row:
            text += f"  ideal {row['ideal_ms']:.1f} ms, attention {row['measured_balance']:.2f} of the mean"
        if "of_plain" in row:
            text += f"  x{row['of_plain']:.3f} of plain, share of ideal {_percent(row['share_of_ideal'])}"
        if "balance_before" in row:
            text += (
                f"  balance {row['balance_before']:.2f} -> {row['balance_after']:.2f} (measured "
                f"{row['measured_balance']:.2f}), sent {row['mib_sent_mean']:.0f} / {row['mib_sent_max']:.0f} MiB, "
                f"exposed {max(row['exposed_ms']):.1f} ms, planning {row['planning_ms']:.1f} ms"
            )
        if "peak_gib" in row:
            text += f"  peak {max(row['peak_gib']):.1f} GiB"
        return text

    def markdown(self) -> str:
        """Header, notes and the tables of groups, memory and single batches."""
        about = self.about
        parts = [
            f"**{about['card']} x{about['world']}, {about['date']}**, torch {about['torch']}, DeepSpeed "
            f"{about['deepspeed']}, kernel {self._kernels()}. `{about['command']}`",
            *self.notes,
            self.summary(),
            self.memory_table(),
            NOTES,
            self.batch_table(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def summary(self) -> str:
        """A row for each group of batches and variant."""
        head = ["batches", "variant", "step, ms", "of plain: mean, worst", "share of the ideal", "of all together"]
        head += ["against evened", "balance: predicted", "measured", "MiB: mean, worst", "exposed, ms", "loss"]
        lines = []
        for group in dict.fromkeys(self.groups.values()):
            batches = [self.rows[b] for b, g in self.groups.items() if g == group]
            for variant in dict.fromkeys(v for rows in batches for v in rows):
                rows = [rows[variant] for rows in batches if variant in rows]
                plain = [rows[PLAIN] for rows in batches if variant in rows and PLAIN in rows]
                lines.append([f"{group} ({len(rows)})", variant, *_summary_cells(variant, rows, plain)])
        return "\n".join([_table(head, lines), *self._crosswise()])

    def memory_table(self) -> str:
        """Peaks by variant; nothing on CPU."""
        lines = [
            [variant, _range(m["peak_gib"]), f"{max(m['left_gib']):.2f}", f"{max(m['growth_gib']):.2f}"]
            for variant, m in self.memory.items()
        ]
        return _table(["variant", "peak, GiB", "left, GiB", "growth, GiB"], lines) if lines else ""

    def batch_table(self) -> str:
        """A row for each batch and variant."""
        head = ["batch", "variant", "step, ms", "of plain", "share of the ideal", "balance: predicted", "measured"]
        head += ["MiB: mean, worst", "exposed, ms", "planning, ms"]
        lines = []
        for batch, rows in self.rows.items():
            for variant, row in rows.items():
                cells = _summary_cells(variant, [row], [rows[PLAIN]] if PLAIN in rows else [])
                of_plain = f"{row['of_plain']:.3f}" if "of_plain" in row else ""
                planning = f"{row['planning_ms']:.1f}" if "planning_ms" in row else ""
                lines.append([batch, variant, cells[0], of_plain, cells[2], *cells[5:9], planning])
        return _table(head, lines)

    def _crosswise(self) -> Iterable[str]:
        """long|short against the mean of its two balanced extremes, where they were measured."""
        ends = [self.rows.get(name, {}).get(PLAIN) for name in ("even", "short")]
        if "long|short" in self.rows and all(ends):
            ideal = mean(row["ms"] for row in ends)
            of_ideal = [f"{v} {row['ms'] / ideal:.3f}" for v, row in self.rows["long|short"].items()]
            yield f"\nlong|short against the mean of plain's even and short, {ideal:.1f} ms: {', '.join(of_ideal)}."

    def _kernels(self) -> str:
        return ", ".join(dict.fromkeys(str(row["kernel"]) for rows in self.rows.values() for row in rows.values()))


def _summary_cells(variant: str, rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    """step, of plain, share, share of the sums, against evened, predicted, measured, MiB, exposed, loss."""
    time = f"{mean(row['ms'] for row in rows):.1f}"
    of_plain = [row["of_plain"] for row in rows if "of_plain" in row]
    shares = [row["share_of_ideal"] for row in rows if "share_of_ideal" in row]
    counted = [share for share in shares if share is not None]
    share = together = evened = ""
    if shares:
        share = _percent(mean(counted) if counted else None)
        share += f" ({len(shares) - len(counted)})" if len(counted) < len(shares) else ""
        together = _percent(_of_all(plain, rows, "ideal_ms"))
        against = [row["share_of_evened"] for row in rows if row["share_of_evened"] is not None]
        if against:
            evened = f"{_percent(mean(against))}, {_percent(_of_all(plain, rows, 'evened_ms'))}"
    elif variant == PLAIN:
        share = f"ideal {mean(row['ideal_ms'] for row in rows):.1f} ms"
        if all("evened_ms" in row for row in rows):
            evened = f"{mean(row['evened_ms'] for row in rows):.1f} ms"
    predicted = measured = exposed = sent = ""
    measured_after = mean(row["measured_balance"] for row in rows)
    if "balance_before" in rows[0]:
        predicted = " → ".join(f"{mean(row[f'balance_{w}'] for row in rows):.2f}" for w in ("before", "after"))
        worst = max(rows, key=lambda row: row["exposed_share"])
        exposed = f"{max(worst['exposed_ms']):.1f} ({worst['exposed_share']:.1%})"
    if variant not in (PLAIN, EVENED) and len(plain) == len(rows):
        measured = f"{mean(row['measured_balance'] for row in plain):.2f} → "
    measured += f"{measured_after:.2f}"
    if max(row["mib_sent_max"] for row in rows):
        sent = f"{mean(row['mib_sent_mean'] for row in rows):.0f}, {max(row['mib_sent_max'] for row in rows):.0f}"
    losses = [row["loss_difference"] for row in rows if "loss_difference" in row]
    return [
        time,
        f"{mean(of_plain):.3f}, {max(of_plain):.3f}" if of_plain else "",
        share,
        together,
        evened,
        predicted,
        measured,
        sent,
        exposed,
        f"{max(losses):.1g}" if losses else "",
    ]


def _share(plain: dict[str, Any], row: dict[str, Any], ideal: str) -> float | None:
    """Of the speed-up to an ideal; None where there is none, or next to nothing to gain."""
    gain = plain["ms"] - plain.get(ideal, plain["ms"])
    return (plain["ms"] - row["ms"]) / gain if gain >= LEAST_GAIN * plain["ms"] else None


def _of_all(plain: list[dict[str, Any]], rows: list[dict[str, Any]], ideal: str) -> float | None:
    """The same of the sums over batches that have that ideal."""
    both = [(p, row) for p, row in zip(plain, rows, strict=True) if ideal in p]
    possible = sum(p["ms"] - p[ideal] for p, _ in both)
    return sum(p["ms"] - row["ms"] for p, row in both) / possible if possible else None


def _balance(seconds: list[float]) -> float:
    return max(seconds) / mean(seconds) if any(seconds) else 1.0


def _percent(share: float | None) -> str:
    return "–" if share is None or math.isnan(share) else f"{share:.0%}"


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
