"""Which task runs where, and the threads that run them."""

from managed_exec.scheduling.footprints import Footprint, Footprints
from managed_exec.scheduling.placement import DeviceSnapshot, Placement, PlacementRequest

__all__ = ["DeviceSnapshot", "Footprint", "Footprints", "Placement", "PlacementRequest"]
