"""Rules for arguments that are right one by one and cannot be built, or served, together."""
