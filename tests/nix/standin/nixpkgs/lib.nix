# Of nixpkgs' lib: the functions that nix/ calls, with the same meaning.
rec {
  inherit (builtins)
    all
    attrNames
    attrValues
    concatMap
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
  concatMapStrings = concatMapStringsSep "";
  concatMapStringsSep =
    separator: f: list:
    concatStringsSep separator (map f list);
  fetchers.proxyImpureEnvVars = [ "https_proxy" ];
  filterAttrs =
    keep: set: removeAttrs set (filter (name: !(keep name set.${name})) (attrNames set));
  getBin = drv: drv.bin or drv.out;
  getName = drv: (builtins.parseDrvName drv.name).name;
  hasInfix = infix: text: builtins.length (splitString infix text) > 1;
  hasPrefix = prefix: text: builtins.substring 0 (builtins.stringLength prefix) text == prefix;
  hasSuffix =
    suffix: text:
    let
      short = builtins.stringLength text - builtins.stringLength suffix;
    in
    short >= 0 && builtins.substring short (-1) text == suffix;
  importTOML = path: builtins.fromTOML (builtins.readFile path);
  importJSON = path: builtins.fromJSON (builtins.readFile path);
  last = list: elemAt list (builtins.length list - 1);
  makeBinPath = concatMapStringsSep ":" (package: "${package}/bin");
  makeLibraryPath = concatMapStringsSep ":" (package: "${package}/lib");
  mapAttrs' = f: set: builtins.listToAttrs (map (name: f name set.${name}) (attrNames set));
  mapAttrsToList = f: set: map (name: f name set.${name}) (attrNames set);
  naturalSort = builtins.sort builtins.lessThan;
  optional = condition: value: if condition then [ value ] else [ ];
  optionals = condition: list: if condition then list else [ ];
  optionalAttrs = condition: set: if condition then set else { };
  versionAtLeast = version: least: builtins.compareVersions version least >= 0;
  optionalString = condition: text: if condition then text else "";
  removePrefix =
    prefix: text:
    if builtins.substring 0 (builtins.stringLength prefix) text == prefix then
      builtins.substring (builtins.stringLength prefix) (builtins.stringLength text) text
    else
      text;
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
  toInt = builtins.fromJSON;
  unique = foldl' (found: item: if elem item found then found else found ++ [ item ]) [ ];
  toList = value: if builtins.isList value then value else [ value ];
}
