# SPDX-License-Identifier: Apache-2.0
"""docs/models.md from what the sweep over all decoders found: python -m tests.distributed.models_table rewrites it."""

from __future__ import annotations

import re
from typing import Any

import transformers

from tests.distributed import model_families
from tests.distributed.harness import ROOT, run_ranks

PAGE = ROOT / "docs" / "models.md"
BOUND = 1e-5
#: The sweep is cut into so many parts, each a run of two ranks and a test.
PARTS = 4

_TEXT = """# Models

All {count} model types of transformers' causal decoders (`MODEL_FOR_CAUSAL_LM_MAPPING` of transformers {version}) were
tried: {exact_count} are exact, {alone_count} of them with one document a row,
{refused_count} are refused by an error, {absent_count} cannot be tried.
`python -m tests.distributed.models_table` makes this page, and a test fails when it no longer says what is found.

## Exact

A tiny random instance in fp32 on two ranks, with attention tasks moved between them: five documents of 1 to 47 tokens,
windows of {window} keys. The documents were given in four ways: one that continues on the next rank, whole ones packed
by position ids, rows padded on the right, rows padded on the left. Each time the loss and every parameter's gradient
equal those of each document run alone in one process by the model's own attention, to a relative {bound:g}. A router
loss is a mean over a rank's tokens, and equals the model's own on the same rows padded.

{exact}

## Exact with one document a row

Something beside core attention passes through a document here: a convolution, a recurrent state, a count of places
that position ids do not change. So a document must be whole on a rank, in a row of its own, with padding behind it.
There the loss, all gradients and a router loss are exact as above, and attention tasks move as ever. The other three
ways are an error on every rank.

{alone}

### Hybrid models

- Give one document a row, padded on the right, as transformers' `DataCollatorForSeq2Seq` does with `padding_side`
  "right". Padding is computed, too: sort documents by length.
- transformers' own torch code keeps no packed documents apart, and raises an error where it is told of borders. Its
  kernels do: `causal-conv1d`, with `flash-linear-attention` (gated delta nets, KDA) or `mamba-ssm` (Mamba 2). Where
  they are installed, the plugin tries whether packed rows are exact when it hands on `seq_idx` and `cu_seq_lens_q`. If
  so a batch may also be one packed row, described in any way (`PackedSequenceCollator`, or `GlobalPackedLoader` with
  `placement="whole"`). This was run with stand-ins for the kernels (`tests/distributed/test_hybrids.py`), not with
  themselves.
- `"overlap": "ping_pong"` is refused, since the second half of a row would begin without a state.

## Shared prefixes

The models of the first table take [trees](data.md#shared-prefixes), too: loss and gradients are those of every text
alone, in layers with windows as well. Tried were models with grouped queries, experts, sinks, softcap, longrope, and
windows shorter and longer than a text (`tests/distributed/test_trees.py`); the others were not. Refused on every rank:

- models that need one document a row, take no position ids, or give one result for a row;
- two sets of rotary frequencies (longrope), where a tree has texts on both sides of the length at which they change:
  these cannot share their beginning. Where frequencies follow the length (dynamic) this model's limit of a document
  is that of a tree's longest text;
- pipelines.

A router loss is a mean over rows, so it counts a token that texts share once.

## Refused

By an error that names the model or its module, when `deepspeed.initialize` is called or in the first forward, before
anything is trained. `"enabled": false` in the `distca` block runs such a model without the plugin.

{refused}

## Not applicable

{absent}

## Models that are not in these tables

Every model is tried on a few tiny documents when `deepspeed.initialize` is called: what it makes of a packed document,
or at least of one before padding, must be what it makes of the document alone. Its first forward is looked at, too:
each of its attention modules must call the interface once, with the window it was planned with, and the mask that
transformers would have built for it must be causal attention inside documents with that very window. What differs is
refused.

Also refused, on every rank: attention dropout, `output_attentions` in training, a KV cache in training, masks of three
and more dimensions, multi-axis position ids. Evaluation without a packed batch, `generate()` and KV caches go the
model's own way.

PEFT wrappers (LoRA with keys and values frozen too), frozen layers, tied embeddings, router losses, `torch.compile`
and several models in one process are covered by `tests/huggingface`.
"""


def part_names(part: int) -> list[str]:
    """The models of a part, by the alphabet."""
    names = list(model_families.ALL)
    size = -(-len(names) // PARTS)
    return names[part * size : (part + 1) * size]


def measure(part: int) -> list[dict[str, Any]]:
    """Runs a part of the models over two ranks; of each model, what is worse of what the ranks found."""
    ranks = run_ranks("tests.distributed.models_worker:run", 2, names=part_names(part))
    return [max(found, key=_badness) for found in zip(*ranks, strict=True)]


def _badness(found: dict[str, Any]) -> tuple[bool, float]:
    return fault(found) is not None, max(
        (way.get("error", 0.0) for way in found.get("ways", {}).values()), default=0.0
    )


def fault(found: dict[str, Any]) -> str | None:
    """What is wrong with what was found of a model; None: it is exact, refused by name, or has a reason."""
    name = found["name"]
    if "failed" in found:
        return f"{name}: {found['failed']}"
    if "absent" in found:
        return None if name in model_families.NOT_APPLICABLE else f"{name} does not run alone: {found['absent']}"
    for way, outcome in {"at once": found, **found.get("ways", {})}.items():
        if "refused" in outcome and not outcome["by_name"]:
            return f"{name} {way}: refused without a name: {outcome['refused']}"
        if "error" in outcome and outcome["error"] > BOUND:
            return f"{name} {way}: off by {outcome['error']:.1e} ({outcome['parameter']})"
        if outcome.get("bytes_moved") == 0:
            return f"{name} {way}: nothing was moved"
    return None


def _refusals(found: dict[str, Any]) -> list[str]:
    return [outcome["refused"] for outcome in (found, *found.get("ways", {}).values()) if "refused" in outcome]


def _reason(message: str, cls: str) -> str:
    """A refusal's words without the model's name, its numbers and the remedy, so that models share them."""
    message = re.split(r"[.;] (?:Set|set|Leave|only|`?distca)", message)[0]
    message = re.sub(rf"^{cls}(?: \([\w-]+\))?:? ", "", message)
    message = re.sub(r"^\w*Attention\w*:? ", "its attention: ", message)
    message = re.sub(r" \(by [\d.e+-]+\)", "", message)
    return re.sub(r"\[\d+(, \d+)+\]", "[…]", message).strip()


def page(results: list[dict[str, Any]]) -> str:
    """The text of docs/models.md."""
    exact, alone = (["| model | class | features |", "|---|---|---|"] for _ in range(2))
    refused: dict[str, list[str]] = {}
    absent: dict[str, list[str]] = {}
    for found in results:
        name = found["name"]
        if "absent" in found:
            absent.setdefault(model_families.NOT_APPLICABLE.get(name, found["absent"]), []).append(name)
            continue
        if fault(found) is not None:
            exact.append(f"| {name} | `{found.get('class', '')}` | WRONG: {fault(found)} |")
            continue
        refusals = _refusals(found)
        ways = [way for way, outcome in found.get("ways", {}).items() if "refused" not in outcome]
        if ways:
            notes = [found["features"]] if found["features"] else []
            notes += ["router loss"] * ("router loss" in ways)
            table = alone if [way for way in ways if way != "router loss"] == ["padded right"] else exact
            if table is exact:
                notes += [f"refused: {way}" for way in found["ways"] if way not in ways]
            table.append(f"| {name} | `{found['class']}` | {', '.join(notes)} |")
        if refusals and not ways:
            refused.setdefault(_reason(refusals[0], found["class"]), []).append(name)
    tables = []
    for reasons in (refused, absent):
        rows = ["| models | reason |", "|---|---|"]
        rows += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
        tables.append("\n".join(rows))
    return _TEXT.format(
        version=".".join(transformers.__version__.split(".")[:2]),
        count=len(model_families.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        exact_count=_types(row.split(" | ")[0][2:] for row in [*exact[2:], *alone[2:]]),
        alone_count=_types(row.split(" | ")[0][2:] for row in alone[2:]),
        refused_count=_types(name for names in refused.values() for name in names),
        absent_count=_types(name for names in absent.values() for name in names),
        window=model_families.WINDOW,
        bound=BOUND,
        exact="\n".join(exact),
        alone="\n".join(alone),
        refused=tables[0],
        absent=tables[1],
    )


def _types(names: Any) -> int:
    """How many of the names are model types, not variants."""
    return sum(name not in model_families.VARIANTS for name in names)


if __name__ == "__main__":
    everything = [found for part in range(PARTS) for found in measure(part)]
    for wrong in filter(None, map(fault, everything)):
        print(wrong)
    PAGE.write_text(page(everything))
