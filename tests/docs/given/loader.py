"""What docs/balancing.md takes as given, and a trainer."""

from lightning.pytorch import Trainer

import lightning_odc
from tests.docs.given.balancing import dataset, model, rank, stream

trainer = Trainer(strategy="odc", max_epochs=1)
