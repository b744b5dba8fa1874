#!/usr/bin/env bash
# Passes the tests of meshd. Installs what they need with apt when it may, else
# says what to install. The tests start their servers themselves, unprivileged,
# on free ports of loopback, and stop them.
#
#   integration/test.sh [ARGUMENTS OF GO TEST]      default: -race ./...
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
need() { # need COMMAND-OR-FILE PACKAGE
  command -v "$1" >/dev/null || compgen -G "$1" >/dev/null || missing+=("$2")
}
need "/usr/lib/postgresql/*/bin/postgres" postgresql
need gcc gcc
need "/usr/include/stdlib.h" libc6-dev
need ip iproute2
need iptables iptables
need dockerd docker.io
need docker-compose docker-compose

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing ${missing[*]}"
    # No service is started by its package: the tests start their own.
    mkdir -p /etc/postgresql-common
    [ -e /etc/postgresql-common/createcluster.conf ] || echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >/dev/null
    apt-get install -yq --no-install-recommends "${missing[@]}" >/dev/null
  elif [ -n "${MESHD_REQUIRE_SERVERS:-}" ]; then
    echo "Missing: ${missing[*]}. Install them: sudo apt-get install ${missing[*]}" >&2
    exit 1
  else
    echo "Missing: ${missing[*]}. Tests that need them are skipped; sudo apt-get install ${missing[*]} runs them all." >&2
  fi
fi

[ $# -gt 0 ] || set -- -race ./...
exec go test -timeout 30m "$@"
