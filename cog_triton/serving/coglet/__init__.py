"""Workarounds for Cog 0.23.1 and uses of its internals; each says when to delete it."""
