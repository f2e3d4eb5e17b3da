"""From what a user names - a hub id, a directory, a GGUF file, an engine - to what is served."""
