"""The mock family: real Cog and real Triton around an engine that only keeps time.

It says a fixed passage over and over, at a set rate, so that everything but an engine can be
measured and broken at will; see docs/mock.md.
"""
