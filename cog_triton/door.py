"""The name of `cog_triton.serve` in 0.4, for one more release: ``python -m cog_triton.door``."""

import sys

from cog_triton.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
