"""TensorRT-LLM's own scripts, from a tree of sources: do they make what is expected here?

    python tests/upstream/run_upstream.py DIRECTORY [FAMILY...] [--tp 1,2]

Converts a small random model of each family by the tree's own convert_checkpoint.py and compares
every tensor; builds it by `cog-triton build` up to TensorRT's compile. Ends with 1 if a tensor
or a build is not as expected.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upstream import conversion_runs
from upstream import engine_builds as builds
from upstream.families import EXAMPLES
from upstream.installation import ENVIRONMENT, ROOT, install, version_of
from upstream.report import markdown

WORK = ROOT / ".work" / "upstream-runs"


def main() -> int:
    usage = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=usage)
    parser.add_argument("directory", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(EXAMPLES))
    parser.add_argument("--tp", default="1,2", help="tensor parallelism of the conversions")
    parser.add_argument("--no-builds", action="store_true", help="convert only")
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
    print(f"TensorRT-LLM {tree.version}: {len(tree.scripts)} scripts", flush=True)
    make = [ENVIRONMENT / "bin" / "python", Path(__file__).with_name("random_models.py")]
    subprocess.run([*make, models, *families], check=True, stderr=subprocess.DEVNULL)
    sizes = [int(tp) for tp in args.tp.split(",")]
    conversions = conversion_runs.convert(tree, models, output, families, sizes)
    for conversion in conversions:
        print(conversion, flush=True)
    built = []
    for conversion in () if args.no_builds else builds.wanted(conversions):
        built.append(builds.build(tree, models, output, conversion))
        print(built[-1], flush=True)
    text = markdown(tree.version, conversions, built)
    (output / "report.md").write_text(text)
    print(text)
    return int(any(c.differences for c in conversions) or any(b.problem for b in built))


if __name__ == "__main__":
    sys.exit(main())
