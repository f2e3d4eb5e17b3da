# Images from NGC's root file system, Cog and our source: runners and the builder of engines.
{
  pkgs,
  python,
  archs,
  image,
  ngc,
  source,
  wheels,
  licences,
  pruner,
  venv,
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
  colons = lib.concatStringsSep ":";

  # Parts of the root file system, one layer each; registries limit a layer's size.
  # ngc-parts.json says which paths a part has and which are dropped; split_rootfs.py lists them.
  table = lib.importJSON ./ngc-parts.json;

  # kind: "runner" or "builder"; sm: null keeps every SM's builder resources.
  treeOf =
    kind: sm: part:
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
  # Bottom of the image first: what is the same for every SM, then what is pruned to one.
  isPruned = part: part.pruned or false;
  parts =
    lib.reverseList (lib.filter (part: !isPruned part) table.parts) ++ lib.filter isPruned table.parts;

  # kind: "runner" or "builder"; sms: keys of archs.nix or of `archs`, none for every architecture.
  make =
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
      # A runner's common parts must not know its SM, or they would not be common.
      only = if kind == "builder" && sms != [ ] then lib.head sms else null;
      ngcLayer =
        part:
        let
          tree = treeOf kind only part;
        in
        {
          inherit (part) name reason;
          copyToRoot = [ (if sms != [ ] && isPruned part then pruner.prune sms tree else tree) ];
        };
    in
    image {
      inherit name components;
      description = "Cog and NVIDIA's Triton with TensorRT-LLM: a ${kind} of engines";
      python = interpreter;
      schema = source.schema kind;
      arguments = lib.optional (kind == "builder") "--cog-only";
      layers = map ngcLayer parts ++ [
        {
          name = "wheels";
          reason = "Cog and our other wheels: move with the lock";
          copyToRoot = [
            (venv interpreter)
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
    };
in
{
  # The image that serves engines on GPUs of one architecture of archs.nix, or of several:
  # sm = "86", or [ "80" "86" ].
  mkRunner =
    {
      sm,
      # More architectures, as in archs.nix; `fp8` and `fp4` are for labels alone.
      archs ? { },
      name ? null,
    }:
    let
      sms = lib.toList sm;
    in
    make {
      name = if name != null then name else "cog-triton-runner-" + lib.concatStringsSep "-" sms;
      kind = "runner";
      inherit sms archs;
    };

  # The image that builds engines, for every architecture or for one.
  mkBuilder =
    {
      sm ? null,
      archs ? { },
    }:
    make {
      name = "cog-triton-builder" + lib.optionalString (sm != null) "-${sm}";
      kind = "builder";
      sms = lib.optional (sm != null) sm;
      inherit archs;
    };
}
