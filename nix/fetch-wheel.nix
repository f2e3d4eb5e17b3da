# A locked wheel from PyPI, by hash; { file, hash } -> derivation of the file.
{ pkgs }:
{ file, hash }:
let
  inherit (pkgs) lib;
  # name-version[-build]-python-abi-platform.whl
  fields = lib.splitString "-" (lib.removeSuffix ".whl" file);
  field = builtins.elemAt fields;
  tags = builtins.length fields - 3;
in
pkgs.fetchPypi {
  pname = field 0;
  version = lib.concatStringsSep "-" (lib.sublist 1 (tags - 1) fields);
  format = "wheel";
  dist = field tags;
  python = field tags;
  abi = field (tags + 1);
  platform = field (tags + 2);
  inherit hash;
}
