"""Mock family: the real Cog and Triton around an engine that replays a fixed text at a set rate.

For load tests and fault injection without a model; see docs/mock.md.
"""
