# `nix develop`: what `make` and scripts/ want. The Python packages come from the lock.
{ pkgs, python }:
pkgs.mkShell {
  packages = [
    python
    pkgs.uv
    pkgs.gnumake
    pkgs.crane
    pkgs.skopeo
    pkgs.nixfmt
    pkgs.statix
    pkgs.deadnix
  ];
}
