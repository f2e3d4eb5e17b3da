"""The front door: the process that owns every public port, and what may pass it."""
