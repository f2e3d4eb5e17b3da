# Of nixpkgs' packages: those that nix/ uses. The tests write host.json, which says where this
# machine's Python is, and device_code.so, a library with code for several GPUs; everything else is
# found in PATH when a derivation is built.
let
  lib = import ./lib.nix;
  host = lib.importJSON ./host.json;
  system = "x86_64-linux";
  searched = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

  runCommand =
    name: attributes: text:
    let
      passed = removeAttrs attributes [
        "nativeBuildInputs"
        "passthru"
        "meta"
      ];
      tools = attributes.nativeBuildInputs or [ ];
      # NVIDIA's root file system is 30 GB behind a registry: its recipe runs all the same, on the
      # look-alike that our crane exports, and so without its hash.
      isNgc = lib.elem crane tools;
      fixed = if isNgc then { } else { inherit (passed) outputHash outputHashMode; };
    in
    derivation (
      removeAttrs passed [
        "outputHash"
        "outputHashMode"
      ]
      // lib.optionalAttrs (passed ? outputHash) fixed
      // {
        inherit name system;
        builder = "/bin/bash";
        args = [
          "-euo"
          "pipefail"
          "-c"
          ''. "$buildCommandPath"''
        ];
        PATH = lib.concatStringsSep ":" (map (tool: "${tool}/bin") tools ++ [ searched ]);
        buildCommand = text;
        passAsFile = [ "buildCommand" ] ++ passed.passAsFile or [ ];
      }
    )
    // attributes.passthru or { }
    // lib.optionalAttrs (passed ? outputHash) { inherit (passed) outputHash; };

  # Programs and libraries of this machine, with the libraries they need, as nixpkgs would have
  # them: everything found through the store.
  copied =
    name: arguments:
    runCommand name { } ''
      ${host.python.executable} -I ${./copy_host.py} $out ${glibc} ${arguments}
    '';
  # A program that no image holds: a link to this machine's. Fails when built and not here.
  tool =
    name:
    runCommand name { } ''
      mkdir -p $out/bin
      ln -s "$(type -P ${name})" $out/bin/${name}
    '';
  write =
    name: text:
    runCommand name {
      inherit text;
      passAsFile = [ "text" ];
    } ''install -m 755 "$textPath" $out'';

  glibc = runCommand "glibc" { } ''
    libc=$(ldd /bin/sh | sed -n 's/.*=> \(.*\/libc\.so\.6\).*/\1/p')
    mkdir -p $out/lib
    for name in c m dl pthread rt util resolv anl nss_files nss_dns; do
      cp -L "$(dirname "$libc")/lib$name.so".[0-9] $out/lib/
    done
    cp -L /lib64/ld-linux-x86-64.so.2 $out/lib/
  '';

  interpreter = copied "python3" "--python ${host.python.executable}";
  installer = fetchPypi host.installer;
  python312 = interpreter // {
    pythonVersion = host.python.version;
    # A Python that has some packages: here, one of wheels alone.
    withPackages =
      choose:
      let
        packages = choose {
          inherit installer;
          packaging = tool "packaging";
          pip = tool "pip";
        };
      in
      runCommand "python3-env" { } ''
        mkdir -p $out/bin $out/site
        for wheel in ${toString packages}; do
          ${interpreter}/bin/python3 -m zipfile -e $wheel $out/site
        done
        printf '%s\n' '#!/bin/sh' "PYTHONPATH=$out/site\''${PYTHONPATH:+:\$PYTHONPATH} exec ${interpreter}/bin/python3 \"\$@\"" \
          >$out/bin/python3
        chmod +x $out/bin/python3
      '';
  };

  # Wheels are in the store before anything is built: `nix-store --add-fixed sha256 FILE`.
  fetchPypi =
    {
      pname,
      version,
      format,
      dist ? "py2.py3",
      python ? "py2.py3",
      abi ? "none",
      platform ? "any",
      hash,
    }:
    assert format == "wheel" && dist == python;
    derivation {
      name = "${pname}-${version}-${python}-${abi}-${platform}.whl";
      inherit system;
      builder = "/bin/sh";
      args = [
        "-c"
        ''echo "$name: not in the store; tests/nix puts the locked wheels there" >&2; exit 1''
      ];
      outputHash = hash;
      outputHashMode = "flat";
    };

  crane = runCommand "crane" { } ''
    mkdir -p $out/bin
    bash ${./ngc_tree.sh} $out/rootfs ${./device_code.so}
    printf '%s\n' '#!/bin/sh' \
      'test "$1 $2 $3" = "export --platform linux/amd64" -a "$5" = - || exit 64' \
      "exec ${interpreter}/bin/python3 -I ${./crane_export.py} $out/rootfs" >$out/bin/crane
    chmod +x $out/bin/crane
  '';
  bashInteractive = copied "bash-interactive" "bash";

  # Debian's tcc, with what it finds in /usr elsewhere: headers, libraries. What it links are shared
  # libraries, so that it needs no start-up code.
  tcc = copied "tcc-unwrapped" "tcc";
  tinycc = runCommand "tcc" { } ''
    mkdir -p $out/bin $out/include
    cp -r /usr/lib/x86_64-linux-gnu/tcc $out/lib
    cp -rL /usr/include/*.h /usr/include/linux /usr/include/asm-generic $out/include/
    cp -rL /usr/include/x86_64-linux-gnu/{asm,bits,gnu,sys} $out/include/
    printf '%s\n' '#!/bin/sh' \
      "exec ${tcc}/bin/tcc -B$out/lib -nostdinc -I$out/lib/include -nostdlib \"\$@\" \\" \
      "  -isystem $out/include -L${glibc}/lib ${glibc}/lib/libc.so.6 $out/lib/libtcc1.a" \
      >$out/bin/tcc
    chmod +x $out/bin/tcc
  '';
in
{
  inherit
    lib
    runCommand
    fetchPypi
    glibc
    python312
    crane
    bashInteractive
    tinycc
    ;
  writeScript = write;
  writeText =
    name: text:
    runCommand name {
      inherit text;
      passAsFile = [ "text" ];
    } ''cp "$textPath" $out'';
  writeShellScript = name: text: write name "#!/bin/bash\n${text}";
  mkShell =
    attributes: runCommand "nix-shell" attributes "echo $packages >$out" // attributes;

  coreutils = copied "coreutils" "basename cat chmod cp cut date df dirname du echo env false head id install ln ls mkdir mv pwd readlink rm seq sleep sort stat tail tee test touch tr true uname wc";
  stdenv.cc.cc.lib = copied "gcc-lib" "--libraries libstdc++.so.6 libgcc_s.so.1 --with-libc";
  zlib = copied "zlib" "--libraries libz.so.1";
  cacert = runCommand "cacert" { } ''
    mkdir -p $out/etc/ssl/certs
    cp -L /etc/ssl/certs/ca-certificates.crt $out/etc/ssl/certs/ca-bundle.crt
  '';

  spdx-license-list-data.text = runCommand "spdx-license-list-data-text" { } ''
    mkdir -p $out/text
    for name in 0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSD-3-Clause-Attribution BSL-1.0 CC0-1.0 \
      CNRI-Python GCC-exception-3.1 GPL-3.0-or-later ISC LGPL-2.1-only LGPL-2.1-or-later LLVM-exception \
      MIT MIT-0 MIT-CMU MIT-open-group MPL-2.0 PSF-2.0 Unlicense \
      Zlib blessing bzip2-1.0.6; do
      echo "text of $name" >$out/text/$name.txt
    done
  '';

  gnutar = tool "tar";
  gnused = tool "sed";
  gnumake = tool "make";
  git = tool "git";
  uv = tool "uv";
  skopeo = tool "skopeo";
  cosign = tool "cosign";
  oras = tool "oras";
  zstd = tool "zstd";
  nixfmt = tool "nixfmt";
  deadnix = tool "deadnix";
  statix = tool "statix";
  nixfmt-tree = tool "treefmt";
}
