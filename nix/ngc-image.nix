# An image from NGC's root file system, Cog and our source: what runners and builder share.
{
  pkgs,
  archs,
  image,
  ngc,
  source,
  wheels,
  licences,
  pruner,
  parts,
}:
let
  inherit (pkgs) lib;
  ours = archs;
  ngcEnv = import ./ngc-env.nix { inherit (ngc) versions; };
  interpreter = {
    version =
      if lib.versionAtLeast ngc.versions.python "3.11" then
        ngc.versions.python
      else
        throw "E1305 EngineIncompatible: ${ngc.ref} has Python ${ngc.versions.python}, and cog-triton needs 3.11 or newer: take an NGC release of 24.11 or later";
    home = dirOf ngc.python;
  };
  venv = import ./venv.nix { inherit pkgs; } interpreter;
  colons = lib.concatStringsSep ":";
in
# kind: "runner" or "builder"; sms: keys of archs.nix or of `archs`, none for every architecture.
{
  name,
  kind,
  sms,
  archs,
}:
let
  known = ours // archs;
  names = lib.concatStringsSep ", " (lib.attrNames known);
  components = licences.wheels wheels.cogVersions ++ licences.ngc;
  chosen = map (
    sm:
    known.${sm} or (throw "sm = ${builtins.toJSON sm}: not an architecture of nix/archs.nix (${names})")
  ) sms;
  all = has: lib.boolToString (lib.all has chosen);
  layer = source.layer {
    python = interpreter;
    cog = kind;
  };
  ngcLayer =
    part:
    let
      tree = if chosen != [ ] && part.pruned or false then pruner.prune sms part.tree else part.tree;
    in
    {
      inherit (part) name reason;
      copyToRoot = [ tree ];
    };
  # A runner's common parts must not know its SM, or they would not be common.
  pieces = parts {
    inherit kind;
    sm = if kind == "builder" && sms != [ ] then lib.head sms else null;
  };
in
image {
  inherit name components;
  description = "Cog and NVIDIA's Triton with TensorRT-LLM: a ${kind} of engines";
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
    (licences.layer components)
    {
      name = "source";
      reason = "our source: moves with every change";
      copyToRoot = [ layer ];
    }
  ];
  contents.wheels = lib.attrValues wheels.table.cog;
  env =
    ngcEnv.variables
    // {
      PATH = colons (
        [ "/opt/cog-triton/bin" ] ++ ngcEnv.PATH ++ lib.optionals (kind == "builder") ngcEnv.compiler.PATH
      );
      LD_LIBRARY_PATH = colons ngcEnv.LD_LIBRARY_PATH;
      TRITONSERVER = "/opt/tritonserver/bin/tritonserver";
      COG_TRITON_SM = lib.concatStringsSep "," sms;
    }
    // lib.optionalAttrs (kind == "builder") ngcEnv.compiler.variables
    // lib.optionalAttrs (kind == "builder") {
      COG_MAX_CONCURRENCY = "1";
      COG_TRITON_STEP_PYTHON = "/opt/venv-tritonserver/bin/python3";
      TRTLLM_DIR = "/app";
    };
  labels = {
    "cog-triton.sm" = if sms == [ ] then "any" else lib.concatStringsSep "," sms;
    "cog-triton.python" = ngc.versions.python;
    "cog-triton.triton" = ngc.versions.triton;
    "cog-triton.tensorrt_llm" = ngc.versions.tensorrt_llm;
    "cog-triton.tensorrt" = ngc.versions.tensorrt;
    "cog-triton.cuda" = ngc.versions.cuda;
    "cog-triton.driver" = ">=${ngc.versions.driver}";
    "cog-triton.ngc" = ngc.ref;
    "org.opencontainers.image.base.name" = ngc.ref;
    "run.cog.version" = wheels.versions.cog;
  }
  // lib.optionalAttrs (sms != [ ]) {
    "cog-triton.gpus" = lib.concatMapStringsSep ", " (arch: arch.gpus) chosen;
    "cog-triton.fp8" = all (arch: arch.fp8 or false);
    "cog-triton.fp4" = all (arch: arch.fp4 or false);
  };
}
