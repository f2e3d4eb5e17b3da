# Of nixpkgs' lib: the functions that nix/ calls, with the same meaning.
rec {
  inherit (builtins)
    all
    attrNames
    attrValues
    concatStringsSep
    elem
    elemAt
    filter
    head
    foldl'
    mapAttrs
    ;
  assertMsg = condition: message: condition || throw message;
  boolToString = value: if value then "true" else "false";
  concatMapStringsSep =
    separator: f: list:
    concatStringsSep separator (map f list);
  filterAttrs =
    keep: set: removeAttrs set (filter (name: !(keep name set.${name})) (attrNames set));
  getName = drv: (builtins.parseDrvName drv.name).name;
  hasSuffix =
    suffix: text:
    let
      short = builtins.stringLength text - builtins.stringLength suffix;
    in
    short >= 0 && builtins.substring short (-1) text == suffix;
  importJSON = path: builtins.fromJSON (builtins.readFile path);
  last = list: elemAt list (builtins.length list - 1);
  makeBinPath = concatMapStringsSep ":" (package: "${package}/bin");
  makeLibraryPath = concatMapStringsSep ":" (package: "${package}/lib");
  mapAttrs' = f: set: builtins.listToAttrs (map (name: f name set.${name}) (attrNames set));
  mapAttrsToList = f: set: map (name: f name set.${name}) (attrNames set);
  optional = condition: value: if condition then [ value ] else [ ];
  optionalAttrs = condition: set: if condition then set else { };
  optionalString = condition: text: if condition then text else "";
  removeSuffix =
    suffix: text:
    if hasSuffix suffix text then
      builtins.substring 0 (builtins.stringLength text - builtins.stringLength suffix) text
    else
      text;
  reverseList = list: foldl' (reversed: item: [ item ] ++ reversed) [ ] list;
  splitString = separator: text: filter builtins.isString (builtins.split separator text);
  sublist =
    start: count: list:
    builtins.genList (at: elemAt list (start + at)) count;
  toList = value: if builtins.isList value then value else [ value ];
}
