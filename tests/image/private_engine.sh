#!/usr/bin/env bash
# A Docker engine of the tests' own: runs until standard input ends, then takes away all that it left.
#
#   private_engine.sh FOLDER      FOLDER: to be made and removed here; short, a socket's path has at most 107 bytes
#
# Prints `ready PID` when the engine answers at unix://FOLDER/s; PID's network namespace is where it publishes ports.
# The network is its own: the machine's addresses, routes and firewall stay untouched, and nothing gets out.
# Standard input is a pipe from the tests. However they end, the kernel closes it, and the cleaning up is here.
set -euo pipefail

work=$1
engine=
# What an engine makes outside its own folders; ours to remove only where no other engine made it before.
outside=()
cgroups=(/sys/fs/cgroup /sys/fs/cgroup/*/)
for path in /etc/docker/key.json /opt/containerd /run/containerd /run/docker "${cgroups[@]/%//docker}"; do
    if [ ! -e "$path" ]; then outside+=("$path"); fi
done

# shellcheck disable=SC2329  # called by the trap
clean_up() {
    trap '' HUP INT TERM
    set +e
    if [ -n "$engine" ] && kill -0 "$engine" 2>/dev/null; then
        docker -H "unix://$work/s" ps -aq | xargs -r docker -H "unix://$work/s" rm -fv >/dev/null
        kill "$engine"
        for _ in $(seq 150); do
            kill -0 "$engine" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$engine" 2>/dev/null
        wait "$engine" 2>/dev/null
    fi
    # The containers' network namespaces and what a killed engine held; the innermost first.
    awk -v work="$work/" 'index($2, work) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount -l
    rm -rf --one-file-system "$work"
    for path in "${outside[@]}"; do
        case $path in
        # A cgroup's files are the kernel's, only its folders can be removed.
        /sys/*) find "$path" -depth -type d -exec rmdir {} + 2>/dev/null ;;
        *) rm -rf --one-file-system "$path" ;;
        esac
    done
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

mkdir -m 700 "$work"
# shellcheck disable=SC2016  # expanded by the inner shell
unshare --net -- bash -c 'ip link set lo up && exec dockerd --data-root "$0/data" --exec-root "$0/exec" \
    --host "unix://$0/s" --pidfile "$0/pid"' "$work" </dev/null >"$work/log" 2>&1 &
engine=$!

for _ in $(seq 300); do
    if docker -H "unix://$work/s" version >/dev/null 2>&1; then
        echo "ready $engine"
        cat >/dev/null
        exit 0
    fi
    if ! kill -0 "$engine" 2>/dev/null; then break; fi
    sleep 0.1
done
echo "dockerd did not come up:" >&2
tail -n 20 "$work/log" >&2
exit 1
