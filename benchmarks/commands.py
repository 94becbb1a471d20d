# SPDX-License-Identifier: Apache-2.0
"""How long the commands take that plan and predict, from their start to their last line.

    python benchmarks/commands.py [--save FILE]

Documents of Pretrain and ProLong in random order, as sampled for contexts of 128K, 65,536 tokens a rank, Llama-3-8B,
default options; `plan` reads a layout of them. With --html they write a report too. Processes of their own, one at a
time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workloads.sampling import NAMES, document_lengths, layouts

RANKS, TOKENS, CONTEXT, SEED = (8, 64, 512), 65536, 131072, 1
HEADS = {"query": 32, "key_value": 8, "head_dim": 128}
#: Of one command, what nobody should have to wait for.
LIMIT = 60.0


def seconds(*arguments: str) -> float:
    command = [sys.executable, "-m", "deepspeed_distca.cli", *arguments]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the table in Markdown")
    args = parser.parse_args()
    head = ["documents", "ranks", "plan", "advise", "advise --html", "simulate", "simulate --html"]
    lines, worst = [head, ["---"] * len(head)], 0.0
    with tempfile.TemporaryDirectory() as folder:
        report = ["--html", str(Path(folder) / "report.html")]
        for name in NAMES:
            documents = Path(folder) / f"{name}.json"
            documents.write_text(json.dumps(document_lengths(name, CONTEXT, SEED).tolist()))
            for ranks in RANKS:
                (layout,) = layouts(name, context=CONTEXT, servers=ranks, tokens=TOKENS, batches=1, shuffle=SEED)
                file = Path(folder) / "layout.json"
                file.write_text(json.dumps({"ranks": layout.to_ranks(), "heads": HEADS}))
                of = [str(documents), "--ranks", str(ranks), "--tokens-per-rank", str(TOKENS)]
                taken = [seconds("plan", "--layout", str(file))]
                taken += [seconds(kind, *of, *more) for kind in ("advise", "simulate") for more in ([], report)]
                worst = max(worst, *taken)
                lines.append([name, str(ranks), *(f"{s:.1f}" for s in taken)])
                print(" | ".join(lines[-1]), flush=True)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if args.save:
        about = " ".join((__doc__ or "").partition("[--save FILE]")[2].split())
        where = f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, other work beside it"
        args.save.write_text(f"# Seconds of commands\n\n{about}\n\n{where}:\n\n{table}\n")
    sys.exit(f"the slowest took {worst:.0f} s, more than {LIMIT:.0f}" if worst > LIMIT else 0)


if __name__ == "__main__":
    main()
