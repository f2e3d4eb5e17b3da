"""Engine keeper: starts engine processes and leases them to Triton's stubs."""
