"""The front: every public port of the server, and the requests that may pass it."""
