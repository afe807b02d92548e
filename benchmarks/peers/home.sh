#!/bin/sh
# Brings the peers of `make bench-peers` into a folder, each by its name with its own client.
# Usage: home.sh PYTHON FOLDER.  Each step may fail for itself: what is missing is named, and left out of the run.
# Needs: Debian's apt-get as root for Redis and RabbitMQ; mvn and Java 17 for Kafka; Go for NATS.
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=$1
mkdir -p "$2/bin" "$2/clients" "$2/server"
home=$(cd "$2" && pwd)

step() { # step NAME COMMAND...
    name=$1
    shift
    if "$@"; then echo "$name: ready"; else echo "$name: MISSING, it is left out of the run" >&2; fi
}

clients() {
    "$python" -m pip install -q --disable-pip-version-check --upgrade --target "$home/clients" -r "$here/clients.txt"
}

kafka() {
    ls "$home"/server/kafka_*.jar > /dev/null 2>&1 || mvn -q -B -f "$here/../spark_side/kafka_server.xml" \
        dependency:copy-dependencies -DoutputDirectory="$home/server" -DincludeScope=runtime
}

nats() {
    test -x "$home/bin/nats-server" || GOBIN="$home/bin" go install github.com/nats-io/nats-server/v2@v2.15.2
}

# Only the programs: the benchmark starts its own servers, on free ports of loopback.
debian() {
    { command -v redis-server && command -v rabbitmq-server; } > /dev/null ||
        { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
            --no-install-recommends redis-server rabbitmq-server > /dev/null; }
}

step "clients (pip)" clients
step "Kafka (Maven)" kafka
step "NATS (Go)" nats
step "Redis and RabbitMQ (Debian)" debian
