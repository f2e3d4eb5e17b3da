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
    path = ../.;
    filter =
      path: _:
      builtins.match "cog_triton(/((__init__|errors)\\.py|system(/(__init__|printable|terminal)\\.py)?))?|cog_triton_prune(/[^/]*\\.py)?" (
        lib.removePrefix "${toString ../.}/" path
      ) != null;
  };
  site = "${wheels.cog}/opt/cog-triton/lib/python${python.pythonVersion}/site-packages";
in
rec {
  # Shell text after which a build step's Python has the command.
  environment = ''
    export PYTHONPATH=${tool}:${site}
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
        ${python}/bin/python3 -m cog_triton_prune --embedded --sm ${lib.concatStringsSep "," sms} $out
      '';
}
