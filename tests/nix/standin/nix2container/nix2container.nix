{ pkgs }:
let
  inherit (pkgs) lib;
  tool = pkgs.runCommand "nix2container" { } ''
    mkdir -p $out/bin
    cp ${./layers.py} $out/bin/layers.py
    cp ${./skopeo.py} $out/bin/skopeo.py
    printf '%s\n' '#!/bin/sh' "exec /usr/bin/env python3 -I $out/bin/skopeo.py \"\$@\"" >$out/bin/skopeo
    chmod +x $out/bin/skopeo
  '';
  # __structuredAttrs, for exportReferencesGraph and lists as JSON, needs outputs as a set.
  run =
    name: verb: attributes:
    derivation (
      {
        inherit name;
        system = "x86_64-linux";
        builder = "/bin/bash";
        args = [
          "-euc"
          "PATH=/usr/local/bin:/usr/bin:/bin exec python3 -I ${tool}/bin/layers.py ${verb} $NIX_ATTRS_JSON_FILE"
        ];
        __structuredAttrs = true;
        outputs = [ "out" ];
      }
      // attributes
    );

  buildLayer =
    {
      deps ? [ ],
      copyToRoot ? null,
      ignore ? null,
      layers ? [ ],
      reproducible ? true,
      perms ? [ ],
      maxLayers ? 1,
      metadata ? {
        created_by = "nix2container";
      },
    }:
    assert reproducible && maxLayers == 1;
    let
      roots = if copyToRoot == null then [ ] else lib.toList copyToRoot;
      layer = run "layers.json" "layer" {
        exportReferencesGraph.graph = deps ++ roots;
        rewrites = map (path: {
          path = "${path}";
          regex = "^${path}";
          repl = "";
        }) roots;
        ignore = if ignore == null then "" else "${ignore}";
        parents = map (below: "${below}/layers.json") layers;
        inherit perms metadata;
      };
    in
    layer // { nestedLayers = builtins.concatMap (below: below.nestedLayers) layers ++ layers; };

  buildImage =
    {
      name,
      tag ? null,
      config ? { },
      layers ? [ ],
      copyToRoot ? null,
      arch ? "amd64",
      created ? "0001-01-01T00:00:00Z",
      maxLayers ? 1,
    }:
    let
      # A layer comes with those it was told of, each as often as it was told.
      all = builtins.concatMap (layer: layer.nestedLayers) layers ++ layers;
      configFile = pkgs.writeText "config.json" (builtins.toJSON config);
      top = buildLayer {
        inherit copyToRoot layers maxLayers;
        deps = [ configFile ];
        ignore = configFile;
      };
      image = run "image-${baseNameOf name}.json" "image" {
        inherit config arch created;
        files = map (layer: "${layer}/layers.json") (all ++ [ top ]);
      };
    in
    image
    // {
      imageName = name;
      imageTag = if tag == null then builtins.substring 0 32 (baseNameOf image.outPath) else tag;
    };
in
{
  nix2container = { inherit buildLayer buildImage; };
  skopeo-nix2container = tool;
}
