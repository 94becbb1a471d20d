# SPDX-License-Identifier: Apache-2.0
"""Tries random cases for as long as it is told: ``python -m tests.fuzz batches --seed 0 --seconds 3600``.

batches: what a batch says about its documents, through the front door alone. engine: the same batches through an
engine, against every document alone. doors: batches of ranks that share a layout, with trees, and contradictions on
some ranks, through engines. plans: layouts and options through the planner. attention: what the planner makes of them
carried out, against every document alone. Ends with 1 at the first wrong case, and says its seed.
"""

from __future__ import annotations

import argparse
import collections
import os
import time
from collections.abc import Callable

#: Those that are tried by several ranks together.
_RANKS = ("attention", "doors", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random cases, by seed.")
    parser.add_argument("what", choices=("batches", "plans", *_RANKS))
    parser.add_argument("--seed", type=int, default=0, help="the first one (0)")
    parser.add_argument("--count", type=int, default=1 << 40, help="cases at most")
    parser.add_argument("--ranks", type=int, default=2, help=f"processes of {', '.join(_RANKS)} (2)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time (60)")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if arguments.what in _RANKS:
        from tests.distributed.harness import run_ranks

        wanted = dict(first=arguments.seed, count=arguments.count, seconds=arguments.seconds)
        found = collections.Counter(run_ranks(f"tests.fuzz.{arguments.what}:main", arguments.ranks, **wanted)[0])
    elif arguments.what == "batches":
        from tests.fuzz.batches import check_batch

        found = _each(check_batch, arguments)
    else:
        from tests.scheduler.random_checks import check_plan

        found = _each(check_plan, arguments)
    for name, times in found.most_common():
        print(f"{times:8d} {name}")
    print(f"{found.get('cases', sum(found.values()))} cases from seed {arguments.seed} on, none wrong")


def _each(check: Callable[[int], str | None], arguments: argparse.Namespace) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + arguments.seconds
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if time.monotonic() > end:
            break
        found[check(seed) or "right"] += 1
    return found


if __name__ == "__main__":
    main()
