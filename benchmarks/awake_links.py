# SPDX-License-Identifier: Apache-2.0
"""Keeps the links between two GPUs of one host awake, by 4 KiB from one to the other every 10 ms, until it is stopped.

    python benchmarks/awake_links.py &
    torchrun --nproc_per_node 2 benchmarks/step_time.py --turns --variants evened ... --json awake.json
    kill %1

Beside steps that exchange nothing it shows what links cost that are awake: power, which multiprocessors lack where a
GPU is at its limit. Copies are made by copy engines; no kernel runs.
"""

from __future__ import annotations

import argparse
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="cuda:0")
    parser.add_argument("--target", default="cuda:1")
    parser.add_argument("--seconds", type=float, default=0.01, help="between two copies")
    args = parser.parse_args()
    rows = torch.zeros(1024, device=args.source)
    there = torch.zeros(1024, device=args.target)
    while True:
        there.copy_(rows)
        torch.cuda.synchronize()
        time.sleep(args.seconds)


if __name__ == "__main__":
    main()
