# `nix develop`: what `make` and scripts/ want. The Python packages come from the lock, as wheels.
{
  pkgs,
  python,
  libraries,
}:
pkgs.mkShell {
  packages = [
    python
    pkgs.uv
    pkgs.gnumake
    pkgs.crane
    pkgs.skopeo
    pkgs.cosign
    pkgs.oras
    pkgs.zstd
    pkgs.nixfmt
    pkgs.deadnix
    pkgs.statix
  ];
  LD_LIBRARY_PATH = pkgs.lib.makeLibraryPath libraries;
}
