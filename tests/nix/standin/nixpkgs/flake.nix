# A look-alike of nixpkgs for tests, made of this machine's own programs; no code of nixpkgs.
# It has what nix/ uses and nothing else, with the same names and arguments.
{
  outputs = _: {
    lib = import ./lib.nix;
    legacyPackages.x86_64-linux =
      let
        pkgs = import ./pkgs.nix;
      in
      pkgs // import ./evaluated.nix pkgs;
  };
}
