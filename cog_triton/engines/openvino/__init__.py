"""OpenVINO family: CPU engines made by our own builder."""
