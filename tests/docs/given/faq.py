"""What docs/faq.md takes as given."""

from lightning.pytorch import LightningModule
