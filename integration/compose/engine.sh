#!/usr/bin/env bash
# Runs a command with a Docker engine: the one that answers already, or else a
# private one that ends with the command.
#
#   engine.sh COMMAND [ARGUMENT...]
#
# A private engine needs root and dockerd. It has a network, a process table and
# a /run of its own, its images and volumes in memory, so that the kernel takes
# back everything however it ends, kill -9 as well: no process, file, network or
# firewall rule of the machine's own is touched. Only empty control groups can
# stay after kill -9; the next run removes them.
set -euo pipefail

# sweep PID removes the control groups of the engine that PID ran.
sweep() {
  find /sys/fs/cgroup -depth -type d -path "*/meshd-engine-$1*" -exec rmdir {} \; 2>/dev/null || true
}

if [ -z "${MESHD_ENGINE:-}" ]; then
  timeout 10 docker info >/dev/null 2>&1 && exec "$@"
  command -v dockerd >/dev/null || { echo "engine.sh: no engine answers, and there is no dockerd to start one (Debian: apt-get install docker.io)" >&2; exit 1; }
  for group in $(find /sys/fs/cgroup -type d -name 'meshd-engine-*' -printf '%f\n' | sort -u); do
    [ -e "/proc/${group##*-}" ] || sweep "${group##*-}"
  done
  export MESHD_ENGINE=$$
  # The first process of the namespaces is killed with unshare, and all others
  # with that process.
  exec unshare --net --mount --pid --fork --kill-child --mount-proc -- "$0" "$@"
fi

owner=$MESHD_ENGINE
unset MESHD_ENGINE DOCKER_HOST DOCKER_CONTEXT
mount --make-rprivate /
mount -t tmpfs -o mode=755 meshd-engine /run # hides what runs on the machine from the engine, and the other way round
ip link set lo up
dockerd --host unix:///run/docker.sock --exec-root /run/docker --data-root /run/docker-data --pidfile /run/docker.pid \
  --cgroup-parent "/meshd-engine-$owner" >/run/dockerd.log 2>&1 &
engine=$!
stop() {
  kill $engine 2>/dev/null || true
  wait $engine || true
  sweep "$owner"
}
trap stop EXIT
until docker info >/dev/null 2>&1; do
  kill -0 $engine 2>/dev/null || { echo "engine.sh: dockerd ended:" >&2; tail -5 /run/dockerd.log >&2; exit 1; }
  sleep 0.1
done
"$@"
