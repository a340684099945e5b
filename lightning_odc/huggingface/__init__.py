"""Hugging Face's ``Trainer`` and TRL's trainers with on-demand communication and balanced microbatches."""

from lightning_odc.huggingface.mixin import ODCTrainerMixin

__all__ = ["ODCTrainerMixin"]
