"""Operating system: processes, ports, GPUs, files, terminal, interpreter tuning."""
