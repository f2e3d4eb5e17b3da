# The lowest layer of images that are not made from NVIDIA's container: nixpkgs' Python and C library,
# a shell, and the places outside the store that programs have by heart.
{
  pkgs,
  python,
  venv,
  libraries,
}:
let
  inherit (pkgs) lib;
  interpreter = {
    version = python.pythonVersion;
    home = "${python}/bin";
  };
  tools = [
    pkgs.bashInteractive
    pkgs.coreutils
  ];

  # The wheels' programs are not patched: they find their loader where every distribution has it.
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
in
{
  inherit interpreter;

  layer = {
    name = "base";
    reason = "Python, C library, shell: moves with nixpkgs";
    deps = [ python ] ++ tools ++ libraries;
    copyToRoot = [
      root
      (venv interpreter)
    ];
  };

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
  };
}
