"""Run tasks on every GPU of the machine through the interface of ``concurrent.futures``."""
