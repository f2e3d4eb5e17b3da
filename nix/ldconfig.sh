#!/bin/sh
# `ldconfig -p` as Triton calls it, to find the driver: nothing is cached here, and Triton goes on to
# look in LD_LIBRARY_PATH.
