"""Processes of a server, which are restarted when they die."""
