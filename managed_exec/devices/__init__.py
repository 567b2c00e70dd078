"""The machine's devices: any torch accelerator, the simulated one, and the CPU where there is none."""

from managed_exec.devices.device import AcceleratorDevice, CpuDevice, Device, DeviceMemory, current_stream
from managed_exec.devices.discovery import resolve_devices

__all__ = ["AcceleratorDevice", "CpuDevice", "Device", "DeviceMemory", "current_stream", "resolve_devices"]
