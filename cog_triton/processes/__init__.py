"""Processes of a server: its engines, which are restarted when they die."""
