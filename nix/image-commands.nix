# Executable of an image, which `nix build` leaves as ./result: load, push, inspect, size, files.
{
  pkgs,
  python,
  skopeo,
}:
let
  inherit (pkgs) lib;
  isOurs = path: baseNameOf path == "image_commands";
  modules = builtins.path {
    name = "cog-triton-image-commands";
    path = ./.;
    filter =
      path: type:
      if type == "directory" then isOurs path else isOurs (dirOf path) && lib.hasSuffix ".py" path;
  };
in
image:
let
  described = pkgs.writeText "${image.imageName}-described.json" (
    builtins.toJSON {
      image = "${image}";
      reference = "${image.imageName}:${image.imageTag}";
      skopeo = "${skopeo}/bin/skopeo";
    }
  );
in
# -B: no bytecode beside the modules, for a store that root may write to.
pkgs.writeScript "${image.imageName}-image" ''
  #!${python}/bin/python3 -IB
  import sys

  sys.path.insert(0, "${modules}")
  from image_commands.cli import main

  sys.exit(main("${described}", sys.argv[1:]))
''
