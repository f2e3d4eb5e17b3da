# A look-alike of nix2container for tests: the same functions, arguments, image.json and refusals,
# in Python instead of Go. No code of nix2container.
{
  inputs.nixpkgs.url = "github:NixOS/nixpkgs";
  outputs =
    { nixpkgs, ... }:
    {
      packages.x86_64-linux = import ./nix2container.nix {
        pkgs = nixpkgs.legacyPackages.x86_64-linux;
      };
    };
}
