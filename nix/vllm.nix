# Images for vLLM, runners and builders that seal engines: nixpkgs' Python, wheels of vllm.lock,
# pruned to one GPU architecture. vllm-image.json says what is in them and what is not, with reasons.
{
  pkgs,
  python,
  base,
  image,
  source,
  archs,
  wheels,
  pruner,
  licences,
}:
let
  inherit (pkgs) lib;
  ours = archs;
  table = lib.importJSON ./vllm-image.json;
  locked =
    if wheels.table.vllm == { } then
      throw "nix/wheels.json has no wheels of vLLM for Python ${python.pythonVersion}"
    else
      wheels.table.vllm;
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
  # What a part is made from, so that a change of another part rebuilds nothing.
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
  # sms: a pruned part is made for these; others are the same for every SM.
  build =
    sms: part:
    let
      target = if part.pruned or false then lib.concatStringsSep "," sms else "any";
      suffix = builtins.replaceStrings [ "," ] [ "-" ] target;
    in
    pkgs.runCommand "cog-triton-vllm-${part.name}-${suffix}" { allowedReferences = [ ]; } ''
      ${lib.concatMapStringsSep "\n" (name: wheels.link locked.${name}) part.wheels}
      ${pruner.environment}
      ${wheels.builder}/bin/python3 ${tools}/wheel_part.py ${essence part} ${part.name} ${target} \
        $out/${site} *.whl
      ${wheels.builder}/bin/python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash \
        -s $out -p / $out/${site}
    '';
  version = name: lib.elemAt (lib.splitString "-" locked.${name}.file) 1;
  components = licences.wheels (lib.mapAttrs (name: _: version name) locked) ++ licences.nixpkgs;
  # What other images hold, too, is the same derivation, and so the same layer.
  elsewhere = lib.attrNames wheels.table.cog ++ [ "nvidia-pytriton" ];
  # The last part takes what no other names.
  parts =
    let
      named = lib.concatMap (part: part.wheels or [ ]) table.parts;
      rest = lib.filter (name: !(lib.elem name (named ++ elsewhere))) (lib.attrNames locked);
    in
    map (part: { wheels = rest; } // part) table.parts;
  prunedWheels = builtins.concatMap (
    part: lib.optionals (part.pruned or false) part.wheels
  ) table.parts;
  compiler = import ./compiler.nix { inherit pkgs; };

  # The container toolkit puts the driver's libraries in one of these: Debian's layout, others',
  # GKE's plugin.
  driver = [
    "/usr/lib/x86_64-linux-gnu"
    "/usr/lib64"
    "/usr/local/nvidia/lib64"
  ];
  work = "/opt/cog-triton/work";
  # Humming compiles its kernels with NVRTC in a process of its own, which asks the loader for it.
  nvrtc = "/${site}/nvidia/cu13/lib";
in
# sm: a key of archs.nix or of `archs`, or several of them in a list.
{
  sm,
  archs ? { },
  name ? null,
  # "runner" or "builder": whose Cog project is in it. All packages are the same, as a seal wants.
  kind ? "runner",
}:
let
  sms = lib.toList sm;
  known = ours // archs;
  names = lib.concatStringsSep ", " (lib.attrNames known);
  chosen = map (
    sm:
    known.${sm} or (throw "sm = ${builtins.toJSON sm}: not an architecture of nix/archs.nix (${names})")
  ) sms;
  list = lib.concatStringsSep "," sms;
  pruned = "device code for other GPUs than sm_${list} is zeroed where its licence allows that";
  layerOf = part: {
    inherit (part) name reason;
    copyToRoot = [ (build sms part) ];
  };
in
image {
  name = if name != null then name else "cog-triton-${kind}-vllm-${lib.concatStringsSep "-" sms}";
  description = "Cog and Triton Inference Server with vLLM: a ${kind} of engines for ${
    lib.concatMapStringsSep "; " (arch: arch.gpus) chosen
  }";
  inherit components;
  python = base.interpreter;
  schema = source.schema kind;
  arguments = lib.optional (kind == "builder") "--cog-only";
  layers = [
    (
      base.layer
      // {
        deps = base.layer.deps ++ [ pkgs.tinycc ];
        copyToRoot = base.layer.copyToRoot ++ [ compiler ];
      }
    )
    {
      name = "triton";
      reason = "Triton's server: one pinned wheel";
      copyToRoot = [ wheels.triton ];
    }
  ]
  ++ map layerOf parts
  ++ [
    {
      name = "wheels";
      reason = "Cog and our other wheels: move with the lock";
      copyToRoot = [ wheels.cog ];
    }
    (licences.layer components)
    {
      name = "source";
      reason = "our source: moves with every change";
      copyToRoot = [
        (source.layer {
          python = base.interpreter;
          cog = kind;
        })
      ];
    }
  ];
  contents.wheels = lib.mapAttrsToList (
    name: wheel: wheel // lib.optionalAttrs (lib.elem name prunedWheels) { modified = pruned; }
  ) locked;
  env = base.env // {
    LD_LIBRARY_PATH = lib.concatStringsSep ":" ([ base.env.LD_LIBRARY_PATH ] ++ driver ++ [ nvrtc ]);
    CC = "/bin/cc";
    # What is compiled is loaded from there, which /tmp may not allow.
    TORCHINDUCTOR_CACHE_DIR = "${work}/torchinductor";
    COG_TRITON_SM = list;
    NVIDIA_VISIBLE_DEVICES = "all";
    NVIDIA_DRIVER_CAPABILITIES = "compute,utility";
    # CUDA 13.0's own requirement, which the container toolkit checks before it starts anything.
    NVIDIA_REQUIRE_CUDA = "cuda>=13.0";
    CUDA_VERSION = version "nvidia-cuda-runtime";
  }
  // lib.optionalAttrs (kind == "builder") {
    COG_MAX_CONCURRENCY = "1";
  };
  labels = {
    "cog-triton.sm" = list;
    "cog-triton.gpus" = lib.concatMapStringsSep "; " (arch: arch.gpus) chosen;
    "cog-triton.python" = python.pythonVersion;
    "cog-triton.triton" = "nvidia-pytriton ${wheels.versions.nvidia-pytriton}";
    "cog-triton.vllm" = version "vllm";
    "cog-triton.torch" = version "torch";
    "cog-triton.cuda" = version "nvidia-cuda-runtime";
    "cog-triton.driver" = ">=580";
    "run.cog.version" = wheels.versions.cog;
  };
}
