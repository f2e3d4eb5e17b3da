# Licences of what an image holds: an SPDX expression for its label, and texts for its files.
# A component is { name; version; licence; wheel }; its licence is an SPDX expression, whose
# alternatives are in parentheses.
{ pkgs }:
let
  inherit (pkgs) lib;
  table = lib.importJSON ./licences.json;
  component = name: licence: {
    inherit name licence;
    version = "";
    wheel = false;
  };
  # Of an image's components, each once, in order.
  all =
    components:
    lib.naturalSort (
      lib.unique (lib.concatMap (part: lib.splitString " AND " part.licence) components)
    );
  version = part: lib.optionalString (part.version != "") " ${part.version}";
  line = part: "${part.name}${version part}: ${part.licence}";
  reference = name: "${name}: ${table.references.${name}}";
  isReference = lib.hasPrefix "LicenseRef-";
  # "(A OR B)" and "A WITH B" have two texts.
  textsOf =
    name:
    lib.filter (word: word != "OR" && word != "WITH" && !(isReference word)) (
      lib.splitString " " (builtins.replaceStrings [ "(" ")" ] [ "" "" ] name)
    );
in
rec {
  # versions: { name = version; }, as of wheels.nix.
  wheels = lib.mapAttrsToList (
    name: version: {
      inherit name version;
      licence = table.wheels.${name} or (throw "nix/licences.json has no licence of the wheel ${name}");
      wheel = true;
    }
  );
  nixpkgs = lib.mapAttrsToList component table.nixpkgs;
  ngc = lib.mapAttrsToList component table.ngc;

  # As nixpkgs' meta.license has them; an alternative or an exception is no identifier of SPDX's list.
  list =
    components:
    map (
      name:
      {
        fullName = name;
        free = !(lib.hasPrefix "LicenseRef-NVIDIA" name);
      }
      // lib.optionalAttrs (!(lib.hasInfix " " name || isReference name)) { spdxId = name; }
    ) (all ([ ours ] ++ components));

  expression = components: lib.concatStringsSep " AND " (all ([ ours ] ++ components));
  ours = component "cog-triton" "Apache-2.0";

  # /opt/cog-triton/licenses: our LICENSE, who has which licence, and the texts of them all. Some
  # wheels (coglet, tokenizers) bring no text.
  layer =
    components:
    let
      names = all ([ ours ] ++ components);
      lines = map line ([ ours ] ++ components) ++ [ "" ] ++ map reference (lib.filter isReference names);
    in
    {
      name = "licences";
      reason = "licence texts: move with the lock";
      copyToRoot = [
        (pkgs.runCommand "cog-triton-licences"
          {
            allowedReferences = [ ];
            components = lib.concatStringsSep "\n" lines;
            passAsFile = [ "components" ];
            texts = lib.unique (lib.concatMap textsOf names);
          }
          ''
            licences=$out/opt/cog-triton/licenses
            mkdir -p $licences/texts
            cp ${../LICENSE} $licences/LICENSE
            install -m 444 "$componentsPath" $licences/components.txt
            for name in $texts; do
              cp ${pkgs.spdx-license-list-data.text}/text/$name.txt $licences/texts/
            done
          ''
        )
      ];
    };
}
