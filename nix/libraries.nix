# What a manylinux wheel may expect of its machine, and nixpkgs keeps apart.
{ pkgs }:
[
  pkgs.stdenv.cc.cc.lib
  pkgs.zlib
]
