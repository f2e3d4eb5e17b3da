"""Sources: what a user names, wherever it is."""
