"""The operating system: processes, ports, GPUs, files, terminal, interpreter tuning."""
