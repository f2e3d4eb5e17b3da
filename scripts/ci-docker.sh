#!/usr/bin/env bash
# Start a docker daemon of our own for CI, without touching one that runs: no bridge, no firewall
# rules, so containers have --network host or none. Idempotent.
# usage: scripts/ci-docker.sh start DIRECTORY   prints the DOCKER_HOST to use
#        scripts/ci-docker.sh stop DIRECTORY
set -euo pipefail
verb=${1:?start or stop} directory=$(realpath -m "${2:?a directory}")
socket=$directory/docker.sock pid=$directory/docker.pid

install() {
  command -v dockerd >/dev/null && return
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "no dockerd here; as root run: apt-get install -y docker.io" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io >/dev/null
}

start() {
  mkdir -p "$directory"
  if ! docker -H "unix://$socket" info >/dev/null 2>&1; then
    rm -f "$pid"
    setsid dockerd --data-root "$directory/data" --exec-root "$directory/exec" --pidfile "$pid" \
      -H "unix://$socket" --iptables=false --bridge=none >"$directory/dockerd.log" 2>&1 </dev/null &
    for ((tries = 0; tries < 150; tries++)); do
      docker -H "unix://$socket" info >/dev/null 2>&1 && break
      sleep 0.2
    done
  fi
  docker -H "unix://$socket" info >/dev/null 2>&1 || {
    tail -n 20 "$directory/dockerd.log" >&2
    exit 1
  }
  echo "unix://$socket"
}

stop() {
  [[ -f $pid ]] || return 0
  kill "$(<"$pid")" 2>/dev/null || return 0
  for ((tries = 0; tries < 150; tries++)); do
    [[ -f $pid ]] || break
    sleep 0.2
  done
  if [[ -f $pid ]]; then
    echo "dockerd did not stop" >&2
    exit 1
  fi
  # It leaves the network namespace of its containers mounted.
  while read -r _ mounted _; do
    [[ $mounted != "$directory"/* ]] || umount "$mounted"
  done </proc/mounts
}

case $verb in
  start) install && start ;;
  stop) stop ;;
  *) echo "unknown: $verb" >&2 && exit 64 ;;
esac
