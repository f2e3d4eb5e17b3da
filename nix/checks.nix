# What `nix flake check` builds and evaluates, none of which needs a GPU or NVIDIA's container.
{
  pkgs,
  python,
  self,
  wheels,
  images,
  functions,
  libraries,
}:
let
  inherit (pkgs) lib;
  # What a user's flake may make, which no package shows.
  made = images // {
    several = functions.mkRunner {
      sm = [
        "80"
        "89"
      ];
    };
    vllm = functions.mkVllmRunner {
      sm = [
        "80"
        "89"
      ];
    };
    builder = functions.mkBuilder { sm = "86"; };
    sealing = functions.mkVllmBuilder { sm = "86"; };
    model = functions.mkModel {
      runner = images.cog-triton-runner-cpu;
      weights = "https://example.com/engine.tar";
    };
  };
  sites = map (tree: "${tree}/opt/cog-triton/lib/python${python.pythonVersion}/site-packages") [
    wheels.cog
    wheels.engine
    wheels.model
    wheels.triton
    wheels.tests
  ];
in
{
  cpu-image = images.cog-triton-runner-cpu;

  # Every package, and every function once: evaluated, not built.
  evaluated = pkgs.writeText "cog-triton-evaluated" (
    lib.concatMapStrings (image: builtins.unsafeDiscardStringContext "${image.drvPath}\n") (
      lib.attrValues made
    )
  );

  # `make test-quick` without its lint: a virtual environment that sees the wheels and the source.
  unit-tests =
    pkgs.runCommand "cog-triton-unit-tests"
      {
        nativeBuildInputs = [ pkgs.git ];
        LD_LIBRARY_PATH = lib.makeLibraryPath libraries;
      }
      ''
        cp -r ${self} source
        chmod -R u+w source
        cd source
        export HOME=$NIX_BUILD_TOP/home
        mkdir $HOME
        ${python}/bin/python3 -m venv --without-pip .venv
        # Root, without a sandbox, may write into the store, and pytest would. Tests have a clean
        # environment, so that no variable can say it.
        printf '%s\n' 'import sys; sys.dont_write_bytecode = True' ${toString sites} $PWD >.venv/lib/python${python.pythonVersion}/site-packages/all.pth
        # A sandbox has /bin/sh and no other program outside of the store.
        find scripts -type f -exec sed -i '1s|^#!/usr/bin/env bash|#!${pkgs.bashInteractive}/bin/bash|' {} +
        .venv/bin/python -m pytest -q -m "not full" -p no:cacheprovider \
          -n ''${NIX_BUILD_CORES:-2} --dist loadfile tests/unit | tee $out
      '';

  format =
    pkgs.runCommand "cog-triton-format"
      {
        nativeBuildInputs = [
          pkgs.nixfmt
          pkgs.deadnix
        ];
      }
      ''
        nixfmt --check ${../flake.nix} ${./.}/*.nix
        deadnix --fail ${../flake.nix} ${./.}
        touch $out
      '';
}
