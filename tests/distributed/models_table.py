# SPDX-License-Identifier: Apache-2.0
"""docs/models.md from what the model tests found: python -m tests.distributed.models_table rewrites it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.distributed import model_families
from tests.distributed.harness import ROOT, run_ranks

PAGE = ROOT / "docs" / "models.md"
BOUND = 1e-5

_TEXT = """# Models

Causal decoders whose attention goes through the attention interface of transformers. The tables are made by the
tests (`python -m tests.distributed.models_table`, transformers {version}); a test fails when they no longer say what
it finds.

**Exact** means: a tiny random instance in fp32 over two ranks, five documents of 1 to 47 tokens of which one continues
on the second rank, windows of {window} keys, attention tasks moved between the ranks. The loss and every parameter's
gradient equal those of each document run alone in one process with the model's own eager attention, to a relative
{bound:g}.

{exact}

## Refused

With an error that names the model and the reason, when `deepspeed.initialize` is called or, where it only shows there,
in the first forward. Nothing is trained wrongly in the meantime; `"enabled": false` in the `distca` block runs the
model without the plugin.

{refused}

Models that are not in these tables: the first forward of every model is looked at. Each of its attention modules must
call the interface once, with the window it was planned with, and the mask that transformers would have built for it
must be causal attention inside documents with that very window. What differs is refused.

Also refused, on every rank: attention dropout, `output_attentions` in training, a KV cache in training, masks of three
and more dimensions, multi-axis position ids. Evaluation without a packed batch, `generate()` and KV caches go the
model's own way.

PEFT wrappers (LoRA with keys and values frozen too), frozen layers, tied embeddings, router losses, `torch.compile`
and several models in one process are covered by `tests/integrations`.
"""


def measure(world: int = 2) -> dict[str, Any]:
    """Runs all families over two ranks: results by rank merged to the worst."""
    ranks = run_ranks(
        "tests.distributed.models_worker:run",
        world,
        timeout=280,
        names=list(model_families.EXACT),
        refused=list(model_families.REFUSED_RUNNING),
    )
    exact = []
    for results in zip(*(rank["exact"] for rank in ranks), strict=True):
        failed = [r for r in results if "error" in r]
        exact.append(failed[0] if failed else max(results, key=lambda r: max(r["gradient_error"], r["loss_error"])))
    return {"exact": exact, "refused": [rank["refused"] for rank in ranks]}


def page(exact: list[dict], refused: dict[str, str]) -> str:
    """The text of docs/models.md."""
    rows = ["| model | class | features | exact |", "|---|---|---|---|"]
    for r in exact:
        good = "error" not in r and max(r["gradient_error"], r["loss_error"]) <= BOUND and r["bytes_moved"] > 0
        rows.append(f"| {r['name']} | `{r.get('class', '')}` | {r.get('features', '')} | {'yes' if good else 'NO'} |")
    reasons = ["| model | the error |", "|---|---|"]
    reasons += [f"| {name} | {message.split('. Set `distca')[0]} |" for name, message in refused.items()]
    return _TEXT.format(
        version=".".join(transformers.__version__.split(".")[:2]),
        window=model_families.WINDOW,
        bound=BOUND,
        exact="\n".join(rows),
        refused="\n".join(reasons),
    )


def refused_at_once() -> dict[str, str]:
    """The errors of models that are refused before they run."""
    from deepspeed_distca.integrations.transformers import UnsupportedModelError, attention_modules

    messages = {}
    for name, (model_type, options, _) in model_families.REFUSED.items():
        try:
            attention_modules(model_families.build(model_type, options))
            messages[name] = "not refused"
        except UnsupportedModelError as error:
            messages[name] = str(error)
    return messages


if __name__ == "__main__":
    found = measure()
    Path(PAGE).write_text(page(found["exact"], {**refused_at_once(), **found["refused"][0]}))
