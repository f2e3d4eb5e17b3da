"""Engines in OCI registries: pushed and pulled a layer a file, every byte named by its digest."""
