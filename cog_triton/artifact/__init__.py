"""The engine artifact: manifest, engine.tar, checksums, compression, compatibility."""
