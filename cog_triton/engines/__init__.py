"""Engine families: one interface, one tensor contract, one folder for each family."""
