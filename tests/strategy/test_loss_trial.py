"""One word trains what the user wrote: a loss is tried, and counted as what it is a mean over, or batches stay whole.

One step of SGD with lr 1 shows the gradient. Everything computes in float64. Sums of 16 samples in another order differ
by some 1e-15 of their size, and parameters move by 1e-2 and more: 1e-6 of what training moved is far above that.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc.strategy.odc import ODCStrategy
from tests.support.losses import COUNTS, KINDS, RANDOM, STATEFUL, Losses, collate, dealt, meant, samples
from tests.support.models import full_parameters
from tests.support.modules import said, trainer
from tests.support.ranks import run_ranks

BATCH, ACCUMULATED = 4, 2


def fit_all(
    rank: int, kinds: list[str], options: dict[str, Any]
) -> dict[str, tuple[str, dict[str, Tensor], str]]:
    """By kind: what microbatches count, the parameters after a step, and what was said."""
    found = {}
    for kind in kinds:
        module, data = Losses(kind).double(), samples()
        fitting = trainer(2, strategy=ODCStrategy(**options), accumulate_grad_batches=ACCUMULATED)
        with said() as text:
            fitting.fit(module, DataLoader(data, batch_size=BATCH, collate_fn=collate))  # type: ignore[arg-type]
        recipe = fitting.train_dataloader.recipe  # type: ignore[union-attr]
        counts = "whole" if recipe.whole else str(recipe.counter or recipe.weighting)
        found[kind] = counts, full_parameters(module), text.getvalue()
    return found


@pytest.mark.parametrize("options", [{}, {"communication": "collective"}, {"balance": "lb_mini"}], ids=str)
def test_every_kind_of_loss_trains_what_it_means(options: dict[str, Any]) -> None:
    kinds = list(KINDS) if not options else [kind for kind in KINDS if not kind.startswith("hugging")][::3]
    ranks = run_ranks(fit_all, kinds, options)
    batches = dealt(samples(), 2, BATCH)
    wrong = {}
    for kind in kinds:
        counts, parameters, text = ranks[0][kind]
        expected, before = meant(kind, batches, 2), dict(Losses(kind).double().named_parameters())
        moved = max(float((expected[name] - before[name]).abs().max()) for name in expected)
        error = max(float((parameters[name] - expected[name]).abs().max()) for name in expected) / moved
        if kind not in (*RANDOM, *STATEFUL) and not error < 1e-6:
            wrong[kind] = f"off by {error:.1e} of what training moved; counts {counts}"
        is_right = {"whole": counts == "whole", "samples": counts == "sample", "sum": counts == "sum"}
        if not is_right.get(COUNTS[kind], counts not in ("whole", "sample", "sum")):
            wrong[kind] = f"counts {counts}: {text}"
    assert not wrong, "\n".join(f"{kind}: {text}" for kind, text in wrong.items())
