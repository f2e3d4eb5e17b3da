"""``cog-triton doctor``: checks of this machine, with advice for what fails."""
