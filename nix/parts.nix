# NGC's root file system in pieces: one store path is one layer, and registries limit its size.
# parts.json says what goes where and what is left out; split.py reads it.
{
  pkgs,
  python,
  ngc,
}:
let
  inherit (pkgs) lib;
  table = lib.importJSON ./parts.json;

  # kind: "runner" or "builder"; sm: null keeps every SM's builder resources.
  piece =
    { kind, sm }:
    part:
    part
    // {
      tree =
        pkgs.runCommand "ngc-${part.name}-${kind}${lib.optionalString (sm != null) "-sm${sm}"}"
          {
            nativeBuildInputs = [ pkgs.gnutar ];
            allowedReferences = [ ];
          }
          ''
            mkdir $out
            ${python}/bin/python3 ${./split.py} ${./parts.json} ${ngc.rootfs} \
              ${part.name} ${kind} ${lib.optionalString (sm != null) sm} >$NIX_BUILD_TOP/files
            tar -C ${ngc.rootfs} --no-recursion --null -T $NIX_BUILD_TOP/files -cf - | tar -C $out -xf -

            size=$(du -sb $out | cut -f1)
            if [ "$size" -gt 8000000000 ]; then
              echo "${part.name}: $size bytes; a layer may have 8 GB: split it in nix/parts.json" >&2
              exit 1
            fi
          '';
    };
in
# Bottom of the image first: what is the same for every SM, then what is pruned to one.
{
  kind,
  sm ? null,
}:
let
  pieces = map (piece { inherit kind sm; }) table.parts;
  isPruned = part: part.pruned or false;
in
lib.reverseList (lib.filter (part: !isPruned part) pieces) ++ lib.filter isPruned pieces
