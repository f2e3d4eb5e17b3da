"""Per-SM pruning: removal of device code for other GPUs from shared objects."""
