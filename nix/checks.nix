# What `nix flake check` builds.
{ images }:
{
  cpu-image = images.cog-triton-runner-cpu.image;
}
