"""What every rank did when, recorded and drawn: `TimelineRecorder`."""

from lightning_odc.callbacks.timeline.recorder import TimelineRecorder

__all__ = ["TimelineRecorder"]
