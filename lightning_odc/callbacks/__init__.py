"""Callbacks that measure and show what every rank does."""

from lightning_odc.callbacks.chrome_trace import load_timeline
from lightning_odc.callbacks.finite import FiniteCheck
from lightning_odc.callbacks.gantt import draw_timelines
from lightning_odc.callbacks.idle import DeviceIdleMonitor
from lightning_odc.callbacks.spans import RankTimeline, Timeline
from lightning_odc.callbacks.timeline import TimelineRecorder

__all__ = [
    "DeviceIdleMonitor",
    "FiniteCheck",
    "RankTimeline",
    "Timeline",
    "TimelineRecorder",
    "draw_timelines",
    "load_timeline",
]
