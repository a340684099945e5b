"""How long devices wait, measured: `DeviceIdleMonitor`."""

from lightning_odc.callbacks.idle.monitor import DeviceIdleMonitor

__all__ = ["DeviceIdleMonitor"]
