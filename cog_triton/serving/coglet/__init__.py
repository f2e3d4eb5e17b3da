"""Every use of Cog's internals, each with what to delete when upstream has it."""
