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

  archs = import ./archs.nix;
  revision = self.rev or self.dirtyRev or "unknown";
  date = self.lastModifiedDate or "19700101000000";
  home = (lib.importTOML ../pyproject.toml).project.urls.Repository or null;
  python = pkgs.python312;

  source = import ./source.nix { inherit pkgs; };
  ngc = import ./ngc.nix { inherit pkgs python; };
  licences = import ./licences.nix { inherit pkgs; };
  imageCommands = import ./image-commands.nix {
    inherit
      pkgs
      python
      revision
      home
      ;
    skopeo = containers.skopeo-nix2container;
  };
  image = import ./image.nix {
    inherit
      lib
      revision
      date
      home
      licences
      imageCommands
      ;
    inherit (containers) nix2container;
    inherit (source) version;
  };
  wheelsFor = import ./wheels.nix { inherit pkgs; };
  pruner = import ./pruner.nix {
    inherit pkgs python;
    wheels = wheelsFor python;
  };
  ngcImage = import ./ngc-image.nix {
    inherit
      pkgs
      archs
      image
      ngc
      source
      licences
      pruner
      ;
    wheels = wheelsFor python;
    parts = import ./ngc-parts.nix { inherit pkgs python ngc; };
  };

  mkRunner = import ./mkRunner.nix { inherit ngcImage; };
  mkBuilder = import ./mkBuilder.nix { inherit ngcImage; };
  mkModel = import ./mkModel.nix { inherit lib pkgs; };

  runners = lib.mapAttrs' (sm: _: {
    name = "cog-triton-runner-${sm}";
    value = mkRunner { inherit sm; };
  }) archs;

  cpu = import ./cpu.nix {
    inherit
      pkgs
      python
      image
      source
      licences
      ;
    wheels = wheelsFor python;
  };

  mkVllmRunner = import ./vllm.nix {
    inherit
      pkgs
      python
      image
      source
      archs
      pruner
      licences
      ;
    wheels = wheelsFor python;
  };
  mkVllmBuilder = given: mkVllmRunner ({ kind = "builder"; } // given);
  vllmImages =
    kind: make:
    lib.mapAttrs' (sm: _: {
      name = "cog-triton-${kind}-vllm-${sm}";
      value = make { inherit sm; };
    }) archs;

  images =
    runners
    // vllmImages "runner" mkVllmRunner
    // vllmImages "builder" mkVllmBuilder
    // {
      cog-triton-builder = mkBuilder { };
      cog-triton-runner-cpu = cpu;
    };

  functions = {
    inherit
      archs
      mkRunner
      mkVllmRunner
      mkVllmBuilder
      mkBuilder
      mkModel
      ;
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
  checks.${system} = import ./checks.nix {
    inherit
      pkgs
      python
      self
      images
      functions
      ;
    wheels = wheelsFor python;
  };
  devShells.${system}.default = import ./shell.nix { inherit pkgs python; };
  formatter.${system} = pkgs.nixfmt-tree;
  apps.${system} =
    lib.mapAttrs (_: image: {
      type = "app";
      program = "${image}";
      inherit (image) meta;
    }) images
    // {
      update-pins = import ./update-pins.nix { inherit pkgs python ngc; };
    };
}
