# What `nix flake check` builds: the CPU image, and that the Nix files are formatted and clean.
{
  self,
  pkgs,
  images,
}:
let
  lint =
    name: tools: command:
    pkgs.runCommand "check-${name}" { nativeBuildInputs = tools; } ''
      cd ${self}
      ${command}
      touch $out
    '';
in
{
  cpu-image = images.cog-triton-runner-cpu.image;
  format = lint "format" [ pkgs.nixfmt ] "nixfmt --check flake.nix nix/*.nix";
  statix = lint "statix" [ pkgs.statix ] "statix check .";
  deadnix = lint "deadnix" [ pkgs.deadnix ] "deadnix --fail .";
}
