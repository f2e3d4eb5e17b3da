"""Downloads of models and engines: cached, resumable, checksummed, with progress."""
