#!/bin/bash
# From a bare Debian to the first ordered message, with the commands of README.md and nothing else.
#
#     sudo tests/acceptance/bare_debian.sh FOLDER [SUITE]
#
# Before the clock starts, debootstrap makes a root of Debian SUITE (trixie) in FOLDER, with Python,
# venv, make and git, unless it is there already. The clock runs from `git clone` of the current
# commit to the line that `keylane consume` prints. Names and certificates are those of this
# machine; nothing else of it is seen. docs/FIRST_MESSAGE.md records a run.
set -euo pipefail

folder=${1:?a folder for the root of Debian}
suite=${2:-trixie}
repository=$(cd "$(dirname "$0")/../.." && git rev-parse --show-toplevel)

# The commands of the section "Quick start", without their prompts.
commands=$(awk '/^## /{ inside = $0 == "## Quick start" } inside && /^```python/{ exit } inside' \
    "$repository/README.md" | sed -n 's/^\$ //p')

if [ ! -x "$folder/usr/bin/git" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates \
        "$suite" "$folder" > "$folder.log"
fi
rm -rf "$folder/srv/newcomer" "$folder/mnt/keylane.git"
mkdir -p "$folder/srv/newcomer"
git clone --quiet --bare --single-branch "$repository" "$folder/mnt/keylane.git"
cp /etc/resolv.conf "$folder/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/ca-certificates.crt"

cat > "$folder/srv/newcomer/newcomer.sh" << 'NEWCOMER'
cd /srv/newcomer
began=$(date +%s.%N)
count=0
say() { printf '%6.1f s  $ %s\n' "$(echo "$(date +%s.%N) $began" | awk '{ print $1 - $2 }')" "$1"; }
type_in() { count=$((count + 1)); say "${1% > *}"; eval "$1" || exit 1; }
type_in 'git clone --quiet /mnt/keylane.git keylane && cd keylane'
while IFS= read -r command; do
    case $command in
        'keylane dev'*)
            count=$((count + 1)); say "$command"
            eval "$command" > ../dev.log 2>&1 &
            server=$!
            until grep -q 'keylane subject\|running' ../dev.log; do sleep 0.1; kill -0 $server; done ;;
        *'pip install'*) type_in "$command > ../pip.log" ;;
        *) type_in "$command" ;;
    esac
done < ../commands
seconds=$(echo "$(date +%s.%N) $began" | awk '{ printf "%.1f", $1 - $2 }')
kill -TERM $server && wait $server || true
echo "$count commands, $seconds s, Python $(python3 -c 'import platform; print(platform.python_version())'), Debian $(cat /etc/debian_version)"
NEWCOMER
printf '%s\n' "$commands" > "$folder/srv/newcomer/commands"

# Mounts end with the namespace. The environment is empty but for what a login has.
exec unshare --mount --pid --fork sh -c '
    set -e
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    exec chroot "$1" env -i HOME=/srv/newcomer PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 \
        bash /srv/newcomer/newcomer.sh' sh "$folder"
