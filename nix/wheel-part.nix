# Parts of an image of wheels: what vllm-image.json puts together becomes one layer.
{
  pkgs,
  python,
  # distribution -> { file, hash }
  locked,
  pruner,
  table,
}:
let
  inherit (pkgs) lib;
  fetch = import ./fetch-wheel.nix { inherit pkgs; };
  builder = python.withPackages (packages: [ packages.installer ]);
  tools = builtins.path {
    name = "cog-triton-wheel-tools";
    path = ./.;
    filter =
      path: _:
      lib.elem (baseNameOf path) [
        "install_wheels.py"
        "strip_symbols.py"
        "wheel_part.py"
      ];
  };
  # What a part is made from, so that a change of another part makes nothing anew.
  essence =
    part:
    builtins.toFile "part.json" (
      builtins.toJSON {
        parts = [
          (removeAttrs part [
            "reason"
            "wheels"
          ])
        ];
        inherit (table) dropped stripped;
      }
    );
  site = "opt/cog-triton/lib/python${python.pythonVersion}/site-packages";
  # The store's names begin with a hash, and a wheel's name has a meaning.
  link = wheel: "ln -s ${fetch wheel} ${wheel.file}";

in
{
  # sms: a pruned part is made for these; others are the same for every SM.
  build =
    sms: part:
    let
      target = if part.pruned or false then lib.concatStringsSep "," sms else "any";
      suffix = builtins.replaceStrings [ "," ] [ "-" ] target;
    in
    pkgs.runCommand "cog-triton-vllm-${part.name}-${suffix}" { allowedReferences = [ ]; } ''
      ${lib.concatMapStringsSep "\n" (name: link locked.${name}) part.wheels}
      ${pruner.environment}
      ${builder}/bin/python3 ${tools}/wheel_part.py ${essence part} ${part.name} ${target} \
        $out/${site} *.whl
      ${builder}/bin/python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash \
        -s $out -p / $out/${site}
    '';

  # elsewhere: distributions that other layers hold. The last part takes what no other names.
  parts =
    elsewhere:
    let
      named = builtins.concatMap (part: part.wheels or [ ]) table.parts;
      rest = lib.filter (name: !(lib.elem name (named ++ elsewhere))) (lib.attrNames locked);
    in
    map (part: { wheels = rest; } // part) table.parts;
}
