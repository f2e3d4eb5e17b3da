# What the real nix2container asks of nixpkgs, for scripts/check-flake: evaluated, never built.
pkgs:
let
  unbuilt =
    name: attributes:
    pkgs.runCommand name { } "echo ${name}: a look-alike, only to be evaluated >&2; exit 1"
    // attributes;
in
{
  runCommandLocal = pkgs.runCommand;
  buildGoModule = { pname, src, ... }: unbuilt pname { inherit src; };
  fetchpatch2 = { url, ... }: unbuilt (baseNameOf url) { };
  writeShellApplication = { name, ... }: unbuilt name { };
  go.GOARCH = "amd64";
  jq = unbuilt "jq" { };
  patchutils = unbuilt "patchutils" { };
  skopeo = pkgs.skopeo // {
    overrideAttrs = change: unbuilt "skopeo" (change { nativeBuildInputs = [ ]; });
  };
  stdenv = pkgs.stdenv // {
    isDarwin = false;
  };
}
