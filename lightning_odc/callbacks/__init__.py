"""Callbacks that measure and show what every rank does."""

from lightning_odc.callbacks.idle.monitor import DeviceIdleMonitor
from lightning_odc.callbacks.timeline.chrome_trace import load_timeline
from lightning_odc.callbacks.timeline.gantt import draw_timelines
from lightning_odc.callbacks.timeline.recorder import TimelineRecorder
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline

__all__ = [
    "DeviceIdleMonitor",
    "RankTimeline",
    "Timeline",
    "TimelineRecorder",
    "draw_timelines",
    "load_timeline",
]
