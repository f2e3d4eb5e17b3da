"""tritonserver as a child process: installation, launch, liveness, model repository, client."""
