# The flake's outputs.
{
  self,
  nixpkgs,
  nix2container,
}:
let
  system = "x86_64-linux";
  pkgs = nixpkgs.legacyPackages.${system};
  inherit (pkgs) lib;
  containers = nix2container.packages.${system};

  # What the files here are made of: each gets those of these values that it names.
  scope = {
    inherit pkgs lib self;
    inherit (containers) nix2container;
    skopeo = containers.skopeo-nix2container;
    archs = import ./archs.nix;
    revision = self.rev or self.dirtyRev or "unknown";
    date = self.lastModifiedDate or "19700101000000";
    home = (lib.importTOML ../pyproject.toml).project.urls.Repository or null;
    python = pkgs.python312;
    # What a manylinux wheel may expect of its machine, and nixpkgs keeps apart.
    libraries = [
      pkgs.stdenv.cc.cc.lib
      pkgs.zlib
    ];
    source = call ./source.nix;
    ngc = call ./ngc.nix;
    licences = call ./licences.nix;
    imageCommands = call ./image-commands.nix;
    image = call ./image.nix;
    wheels = call ./wheels.nix;
    pruner = call ./pruner.nix;
    venv = call ./venv.nix;
    base = call ./base.nix;
    inherit images functions;
  };
  call =
    file:
    let
      function = import file;
    in
    function (builtins.intersectAttrs (builtins.functionArgs function) scope);

  forEach =
    name: make:
    lib.mapAttrs' (sm: _: {
      name = "cog-triton-${name}-${sm}";
      value = make { inherit sm; };
    }) scope.archs;
  cpu = call ./cpu.nix;
  images =
    forEach "runner" functions.mkRunner
    // forEach "runner-vllm" functions.mkVllmRunner
    // forEach "builder-vllm" functions.mkVllmBuilder
    // {
      cog-triton-builder = functions.mkBuilder { };
      cog-triton-runner-cpu = cpu;
    };
  functions = call ./ngc-image.nix // rec {
    inherit (scope) archs;
    mkVllmRunner = call ./vllm.nix;
    mkVllmBuilder = given: mkVllmRunner ({ kind = "builder"; } // given);
    mkModel = call ./mkModel.nix;
  };
in
{
  packages.${system} = images // {
    default = cpu;
  };
  # By system, too, as flakes of 0.1.0 name it; all images are for it.
  lib = functions // {
    ${system} = functions;
  };
  checks.${system} = call ./checks.nix;
  devShells.${system}.default = call ./shell.nix;
  formatter.${system} = pkgs.nixfmt-tree;
  apps.${system} =
    lib.mapAttrs (_: image: {
      type = "app";
      program = "${image}";
      inherit (image) meta;
    }) images
    // {
      update-pins = call ./update-pins.nix;
    };
}
