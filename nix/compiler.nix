# What Triton's just-in-time compiler runs besides its own assembler, where it looks: /bin/cc, a C
# compiler (with CC=/bin/cc: Triton asks for gcc or clang), and /sbin/ldconfig. Headers of the C
# library come with tcc, others with the interpreter and Triton.
{ pkgs }:
pkgs.runCommand "cog-triton-cc" { } ''
  mkdir -p $out/bin $out/sbin
  sed 's|''${TCC:-tcc}|${pkgs.lib.getBin pkgs.tinycc}/bin/tcc|' ${./cc.sh} >$out/bin/cc
  cp ${./ldconfig.sh} $out/sbin/ldconfig
  chmod 555 $out/bin/cc $out/sbin/ldconfig
''
