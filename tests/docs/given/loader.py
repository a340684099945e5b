"""What docs/balancing.md takes as given, and a trainer."""

from lightning.pytorch import Trainer

import lightning_odc  # noqa: F401
from tests.docs.given.balancing import dataset, model, rank, stream  # noqa: F401

trainer = Trainer(strategy="odc", max_epochs=1)
