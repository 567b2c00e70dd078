"""Watching devices and pools from outside their tasks."""
