"""TensorRT-LLM's own scripts, from a tree of sources: do they take what cog-triton gives them?

    python tests/upstream/run_upstream.py DIRECTORY [FAMILY...] [--tp 1,2]

Builds a small random model of each family by `cog-triton build` with the tree's own
convert_checkpoint.py and trtllm-build, up to TensorRT's compile. Ends with 1 if a build fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upstream.engine_builds import build
from upstream.families import EXAMPLES
from upstream.installation import ENVIRONMENT, ROOT, install, version_of

WORK = ROOT / ".work" / "upstream-runs"


def main() -> int:
    usage = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=usage)
    parser.add_argument("directory", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(EXAMPLES))
    parser.add_argument("--tp", default="1,2", help="tensor parallelism of the builds")
    args = parser.parse_intermixed_args()
    unknown = {*args.families} - {*EXAMPLES}
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}: there is {', '.join(EXAMPLES)}")
    families = args.families or [*EXAMPLES]
    try:
        output = WORK / version_of(args.directory)
    except LookupError as error:
        parser.error(str(error))
    shutil.rmtree(output, ignore_errors=True)
    models = output / "models"
    models.mkdir(parents=True)
    tree = install(args.directory, output / "python")
    make = [ENVIRONMENT / "bin" / "python", Path(__file__).with_name("random_models.py")]
    subprocess.run([*make, models, *families], check=True, stderr=subprocess.DEVNULL)
    lines = [f"## TensorRT-LLM {tree.version}\n", "| family | tp | built |", "| --- | --- | --- |"]
    failed = False
    for family in families:
        for tp in map(int, args.tp.split(",")):
            problem = build(tree, models / family, family, tp)
            failed |= bool(problem)
            lines.append(f"| {family} | {tp} | {problem or 'up to the compile'} |")
            print(lines[-1], flush=True)
    (output / "report.md").write_text("\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
