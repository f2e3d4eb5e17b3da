"""Double of torch/_inductor."""
