# An image from NGC's root file system, Cog and our source: what runners and builder share.
{
  pkgs,
  archs,
  image,
  ngc,
  source,
  wheels,
  pruner,
  parts,
}:
let
  inherit (pkgs) lib;
  ngcEnv = import ./ngc-env.nix { inherit (ngc) versions; };
  interpreter = {
    version = ngc.versions.python;
    home = dirOf ngc.python;
  };
  venv = import ./venv.nix { inherit pkgs; } interpreter;
  colons = lib.concatStringsSep ":";
in
# kind: "runner" or "builder"; sm: a key of archs.nix, or null for every architecture.
{
  name,
  kind,
  sm,
}:
let
  known = lib.concatStringsSep ", " (lib.attrNames archs);
  layer = source.layer {
    python = interpreter;
    cog = kind;
  };
  ngcLayer =
    part:
    let
      tree = if sm != null && part.pruned or false then pruner sm part.tree else part.tree;
    in
    {
      inherit (part) name reason;
      copyToRoot = [ tree ];
    };
  # A runner's common parts must not know its SM, or they would not be common.
  pieces = parts {
    inherit kind;
    sm = if kind == "builder" then sm else null;
  };
in
assert lib.assertMsg (
  sm == null || archs ? ${sm}
) "sm = ${builtins.toJSON sm}: not an architecture of nix/archs.nix (${known})";
image {
  inherit name;
  python = interpreter;
  schema = source.schema kind;
  arguments = lib.optional (kind == "builder") "--cog-only";
  layers = map ngcLayer pieces ++ [
    {
      name = "wheels";
      reason = "Cog and our other wheels: move with the lock";
      copyToRoot = [
        venv
        wheels.cog
      ];
    }
    {
      name = "source";
      reason = "our source: moves with every change";
      copyToRoot = [ layer ];
    }
  ];
  env =
    ngcEnv.variables
    // {
      PATH = colons ([ "/opt/cog-triton/bin" ] ++ ngcEnv.PATH);
      LD_LIBRARY_PATH = colons ngcEnv.LD_LIBRARY_PATH;
      TRITONSERVER = "/opt/tritonserver/bin/tritonserver";
      COG_TRITON_SM = if sm == null then "" else sm;
    }
    // lib.optionalAttrs (kind == "builder") {
      COG_MAX_CONCURRENCY = "1";
      COG_TRITON_STEP_PYTHON = "/opt/venv-tritonserver/bin/python3";
      TRTLLM_DIR = "/app";
    };
  labels = {
    "cog-triton.sm" = if sm == null then "any" else sm;
    "cog-triton.python" = ngc.versions.python;
    "cog-triton.triton" = ngc.versions.triton;
    "cog-triton.tensorrt_llm" = ngc.versions.tensorrt_llm;
    "cog-triton.tensorrt" = ngc.versions.tensorrt;
    "cog-triton.cuda" = ngc.versions.cuda;
    "cog-triton.driver" = ">=${ngc.versions.driver}";
    "cog-triton.ngc" = ngc.ref;
    "run.cog.version" = wheels.versions.cog;
  }
  // lib.optionalAttrs (sm != null) {
    "cog-triton.gpus" = archs.${sm}.gpus;
    "cog-triton.fp8" = lib.boolToString archs.${sm}.fp8;
  };
}
