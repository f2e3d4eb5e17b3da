#!/usr/bin/env bash
# Install Nix for CI on Debian or Ubuntu, as root, in seconds; nothing to do where it is there.
# For CI alone, which says CI=true: it goes without binary cache, sandbox and build users, as the
# tests build offline, from look-alikes. For images of one's own: docs/images.md, Nix.
#
# Debian trixie's nix-bin (2.26) builds this flake; bookworm's (2.8) cannot read nix2container.
# On an older Debian, trixie's is unpacked beside the system, and its one binary is pointed at the
# libraries that came with it. The sandbox is off: a container has no namespaces to give, and
# /bin in a sandbox's paths would let a build truncate the machine's shell.
#
# cosign 3 and oras come from Debian forky where they are not here: one program each, which any
# libc from 2.34 on runs.
set -euo pipefail
suite=trixie
destination=/opt/nix-$suite

is_new_enough() {
  local version
  version=$(nix --version 2>/dev/null | sed -n 's/.* \([0-9]*\.[0-9]*\).*/\1/p')
  [[ -n $version ]] && [[ $(printf '%s\n2.20\n' "$version" | sort -V | head -n 1) == 2.20 ]]
}

# What the tests of the images use besides Nix: the look-alikes copy programs with patchelf, tcc
# among them, and build libraries with gcc; an image is compressed by zstd, pushed by skopeo to a
# registry, and reached from another network through ip.
missing=()
for pair in git:git patchelf:patchelf gcc:gcc tcc:tcc curl:curl ip:iproute2 skopeo:skopeo \
  docker-registry:docker-registry zstd:zstd openssl:openssl; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
signs() {
  command -v oras >/dev/null && cosign sign --help 2>/dev/null | grep -q use-signing-config
}
((${#missing[@]})) || ! is_new_enough || ! signs || exit 0
if [[ ${CI:-} != true ]]; then
  echo "ci-nix.sh sets up Nix for tests: no binary cache, no sandbox, no build users. To build images of" >&2
  echo "your own, install it as docs/images.md tells; to run the tests, on a machine for that: CI=true $0" >&2
  exit 1
fi
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
  echo "no Nix 2.20 or newer here, or no cosign 3, oras ${missing[*]}; no root with apt-get to install it" >&2
  exit 1
fi
apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

unpack() { # suite, directory, packages with commas: beside the system, with what they need
  apt_install mmdebstrap debian-archive-keyring
  # Debian has the one file or the other.
  local mirror
  mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources 2>/dev/null || true; } |
    sed -n 's/^URIs: *//p; s/^deb  *\(\[[^]]*\] \)\?\(http[^ ]*\).*/\2/p' | head -n 1)
  rm -rf "$2"
  mmdebstrap --quiet --variant=extract --architectures=amd64 --components=main \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --include="$3" "$1" "$2" "$mirror"
}

apt-get update -qq
apt_install libc6-dev patchelf "${missing[@]}"
if ! signs; then
  unpack forky /opt/sign-forky cosign,oras
  ln -sf /opt/sign-forky/usr/bin/{cosign,oras} /usr/local/bin/
fi
if is_new_enough; then
  exit 0
fi
candidate=$(apt-cache policy nix-bin | sed -n 's/.*Candidate: \([0-9]*\.[0-9]*\).*/\1/p')
if [[ $(printf '%s\n2.20\n' "${candidate:-0}" | sort -V | head -n 1) == 2.20 ]]; then
  apt_install nix-bin
else
  unpack "$suite" "$destination" nix-bin
  libraries=$destination/usr/lib/x86_64-linux-gnu
  patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath \
    --set-rpath "$libraries" "$(readlink -f "$destination/usr/bin/nix")"
  for program in "$destination"/usr/bin/nix*; do
    ln -sf "$program" "/usr/local/bin/${program##*/}"
  done
fi

mkdir -p /etc/nix
if [[ ! -f /etc/nix/nix.conf ]] || ! grep -q flakes /etc/nix/nix.conf; then
  cat >>/etc/nix/nix.conf <<'CONFIG'
experimental-features = nix-command flakes
build-users-group =
sandbox = false
substituters =
flake-registry =
warn-dirty = false
CONFIG
fi
nix --version
