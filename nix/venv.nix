# /opt/cog-triton as a virtual environment of an interpreter that the image has: what is
# installed in it is seen by /opt/cog-triton/bin/python alone, without any variable.
{ pkgs }:
# python: { version, home }: the interpreter's X.Y and the directory it is found in.
python:
pkgs.runCommand "cog-triton-venv" { } ''
  venv=$out/opt/cog-triton
  mkdir -p $venv/bin $venv/lib/python${python.version}/site-packages $venv/work
  ln -s lib $venv/lib64
  for name in python python3 python${python.version}; do
    ln -s ${python.home}/python${python.version} $venv/bin/$name
  done
  cat >$venv/pyvenv.cfg <<END
  home = ${python.home}
  include-system-site-packages = false
  version = ${python.version}
  END
''
