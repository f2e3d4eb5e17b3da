# `cog-triton prune` with only the source files that it imports: other changes prune nothing anew.
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
      path: _:
      let
        inside = lib.last (lib.splitString "/cog_triton/" path);
      in
      builtins.match "(__init__|errors)\\.py|cli(/(__init__|prune)\\.py)?|system(/(__init__|printable|terminal)\\.py)?|prune(/[^/]*\\.py)?" inside
      != null;
  };
  site = "${wheels.cog}/opt/cog-triton/lib/python${python.pythonVersion}/site-packages";
in
rec {
  # Shell text after which a build step's Python has the command.
  environment = ''
    mkdir $NIX_BUILD_TOP/package
    ln -s ${tool} $NIX_BUILD_TOP/package/cog_triton
    export PYTHONPATH=$NIX_BUILD_TOP/package:${site}
    export PYTHONDONTWRITEBYTECODE=1
  '';

  # sms: the architectures to keep; tree: a part of NGC's root file system.
  prune =
    sms: tree:
    pkgs.runCommand "${lib.getName tree}-sm${lib.concatStringsSep "-" sms}" { allowedReferences = [ ]; }
      ''
        cp -r ${tree} $out
        chmod -R u+w $out
        ${environment}
        ${python}/bin/python3 -m cog_triton.cli.prune --embedded --sm ${lib.concatStringsSep "," sms} $out
      '';
}
