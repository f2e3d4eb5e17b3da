# `cog-triton prune`, apart from the rest of our source: a change elsewhere prunes nothing anew.
{
  pkgs,
  python,
  wheels,
}:
let
  inherit (pkgs) lib;
  tool = builtins.path {
    name = "cog-triton-prune";
    path = ../cog_triton;
    filter =
      path: _: builtins.match "(__init__|__main__|cli|errors|fatbin.*|prune.*)(\\.py)?" (baseNameOf path) != null;
  };
in
# sm: the architecture to keep; tree: a part of NGC's root file system.
sm: tree:
pkgs.runCommand "${lib.getName tree}-sm${sm}" { } ''
  mkdir $NIX_BUILD_TOP/package
  ln -s ${tool} $NIX_BUILD_TOP/package/cog_triton
  export PYTHONPATH=$NIX_BUILD_TOP/package:${wheels.cog}/opt/cog-triton/lib/python${python.pythonVersion}/site-packages
  export PYTHONDONTWRITEBYTECODE=1
  ${python}/bin/python3 -m cog_triton prune --sm ${sm} --output $out ${tree}
''
