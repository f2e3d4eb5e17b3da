# Parts of NGC's root file system, one layer each; registries limit a layer's size.
# ngc-parts.json says which paths a part has and which are dropped; split_rootfs.py lists them.
{
  pkgs,
  python,
  ngc,
}:
let
  inherit (pkgs) lib;
  table = lib.importJSON ./ngc-parts.json;

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
            ${python}/bin/python3 ${./split_rootfs.py} ${./ngc-parts.json} ${ngc.rootfs} \
              ${part.name} ${kind} ${lib.optionalString (sm != null) sm} >$NIX_BUILD_TOP/files
            tar -C ${ngc.rootfs} --no-recursion --null -T $NIX_BUILD_TOP/files -cf - | tar -C $out -xf -

            size=$(du -sb $out | cut -f1)
            if [ "$size" -gt 8000000000 ]; then
              echo "${part.name}: $size bytes; a layer may have 8 GB: split it in nix/ngc-parts.json" >&2
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
