"""tritonserver as a child process: launch, liveness, model repository, client."""
