# `nix run .#update-pins`: fetch everything that is pinned anew, write it down, show the diff.
{
  pkgs,
  python,
  ngc,
}:
let
  script = pkgs.writeShellScript "update-pins" ''
    set -euo pipefail
    export PATH=${
      pkgs.lib.makeBinPath [
        pkgs.crane
        pkgs.git
        pkgs.gnused
        pkgs.uv
        (python.withPackages (packages: [
          packages.packaging
          packages.pip
        ]))
      ]
    }:$PATH
    NGC_REF=${ngc.ref} NGC_HASH=${ngc.rootfs.outputHash} exec ${../scripts/update-pins} "$@"
  '';
in
{
  type = "app";
  program = "${script}";
  meta.description = "Refresh the NGC hash, the wheels and nixpkgs, and print the diff";
}
