"""Double of torch/_inductor/runtime."""
