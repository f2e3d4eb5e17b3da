# Executable of an image, which `nix build` leaves as ./result: load, push, sign, verify, inspect...
{
  pkgs,
  python,
  skopeo,
  revision,
  home,
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

  # What pins an image's inputs, for its provenance.
  pins =
    directory: suffix:
    map (name: "${directory}/${name}") (
      lib.filter (lib.hasSuffix suffix) (lib.attrNames (builtins.readDir (../. + "/${directory}")))
    );
  materials = [ "flake.lock" ] ++ pins "nix" ".json" ++ pins "requirements" ".lock";
  nodes = (lib.importJSON ../flake.lock).nodes;
  source = {
    inherit revision;
    materials = builtins.listToAttrs (
      map (path: {
        name = path;
        value = builtins.hashFile "sha256" (../. + "/${path}");
      }) materials
    );
    inputs = lib.mapAttrs (_: node: node.locked) (lib.filterAttrs (_: node: node ? locked) nodes);
  };
in
# components: as nix/licences.nix has them. contents.wheels: [ { file; hash; modified ? ""; } ], those
# that were unpacked into the layers.
{
  image,
  components,
  contents,
}:
let
  described = pkgs.writeText "${image.imageName}-described.json" (
    builtins.toJSON {
      image = "${image}";
      reference = "${image.imageName}:${image.imageTag}";
      tools = {
        skopeo = "${skopeo}/bin/skopeo";
        cosign = "${pkgs.cosign}/bin/cosign";
        oras = "${pkgs.oras}/bin/oras";
      };
      inherit (contents) wheels;
      inherit source home;
      licences = {
        components = builtins.listToAttrs (
          map (part: {
            inherit (part) name;
            value = part.licence;
          }) components
        );
        inherit (lib.importJSON ./licences.json) references;
      };
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
