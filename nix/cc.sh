#!/bin/sh
# A C compiler as Triton calls it: cc SOURCE -O3 -shared -fPIC -o MODULE -l:libcuda.so.1 -LDIR -IDIR
#
# Triton compiles one file, its calls into the driver, and tcc is 0.3 MB where gcc is 200. What tcc
# does not know is -l:NAME. It follows C99 unless told: cuda.h then leaves tensor maps unaligned,
# and the driver refuses them.
set -eu

find_library() { # NAME ARGUMENT...
  name=$1
  shift
  for argument; do
    case $argument in
      -L*) [ ! -e "${argument#-L}/$name" ] || {
        printf '%s\n' "${argument#-L}/$name"
        return
      } ;;
    esac
  done
  echo "cc: $name: in none of the directories given with -L" >&2
  return 1
}

for argument; do
  shift
  case $argument in
    -l:*)
      # The arguments after this one, then those before it.
      library=$(find_library "${argument#-l:}" "$@")
      set -- "$@" "$library"
      ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "${TCC:-tcc}" -std=c11 "$@"
