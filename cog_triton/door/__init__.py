"""Program of images: see `cog_triton.front`."""
