# SPDX-License-Identifier: Apache-2.0
"""``ds_distca simulate``: a training step by every way to share attention, side by side."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from deepspeed_distca.cli import UsageError
from deepspeed_distca.commands.shared import documents_arguments, one_line, positive_int, read_documents, write_html
from deepspeed_distca.simulator.simulate import over_scale, simulate, write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    documents_arguments(parser, micro_batches=4)
    parser.add_argument("--context", type=positive_int, help="tokens in which documents end (a rank's)")
    parser.add_argument("--nodes", type=positive_int, help="over which the ranks are (of 8 ranks each)")
    parser.add_argument("--stages", type=positive_int, default=1, help="of a pipeline (1)")
    parser.add_argument("--placed", action="store_true", help="also with documents where the loader stores them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--trace", metavar="FILE", help="write a step by rank, for ui.perfetto.dev")
    parser.add_argument("--html", metavar="FILE", help="write a report with figures, one file; 8 to 512 ranks as well")


def run(arguments: argparse.Namespace) -> int:
    """Predicts, prints and writes; the exit status."""
    with one_line(arguments.documents):
        lengths, training, source = read_documents(arguments, None)
        ranks, nodes = arguments.ranks, arguments.nodes
        if nodes and ranks % nodes:
            raise UsageError(f"--ranks {ranks} cannot be divided into --nodes {nodes}; give a divisor")
        training = replace(training, stages=arguments.stages)
        layout = {
            "tokens": arguments.tokens_per_rank,
            "node_size": ranks // nodes if nodes else 8,
            "context": arguments.context,
            "count": arguments.micro_batches,
            "seed": arguments.seed,
        }
        found = simulate(lengths, training, ranks=ranks, placed=arguments.placed, **layout)
        if arguments.trace:
            write_trace(found, Path(arguments.trace))
    if arguments.html:
        from deepspeed_distca.report.pages import simulate_page

        write_html(arguments.html, simulate_page(found, over_scale(lengths, training, **layout)))
    if arguments.json:
        print(json.dumps(found.to_dict()))
        return 0
    print(f"model: {training.model.name}; cost model {source}")
    print(found)
    return 0
