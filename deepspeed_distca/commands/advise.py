# SPDX-License-Identifier: Apache-2.0
"""``ds_distca advise``: whether the plugin pays for some documents, a model and a number of GPUs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from deepspeed_distca.commands.shared import documents_arguments, one_line, positive_int, read_documents, write_html
from deepspeed_distca.simulator.advise import advise
from deepspeed_distca.simulator.documents import micro_batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    documents_arguments(parser, micro_batches=20)
    parser.add_argument("--node-size", type=positive_int, help="GPUs of a node, of several (all are in one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--html", metavar="FILE", help="write a report with figures, one file")


def run(arguments: argparse.Namespace) -> int:
    """Predicts, prints and writes; the exit status."""
    ranks, tokens, seed = arguments.ranks, arguments.tokens_per_rank, arguments.seed
    with one_line(arguments.documents):
        lengths, training, source = read_documents(arguments, arguments.node_size)
        advice = advise(lengths, training, ranks=ranks, tokens=tokens, count=arguments.micro_batches, seed=seed)
    if arguments.html:
        from deepspeed_distca.report.pages import advise_page

        (first,) = micro_batches(lengths, ranks, tokens, 1, seed)
        write_html(arguments.html, advise_page(advice, training, first))
    if arguments.json:
        print(json.dumps(asdict(advice)))
        return 0
    print(f"model: {training.model.name}; cost model {source}")
    print(advice)
    return 0
