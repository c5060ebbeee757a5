#!/usr/bin/env bash
# A Docker engine of the tests' own: runs until standard input ends, then takes away all that it left.
#
#   private_engine.sh FOLDER      FOLDER: to be made and removed here; short, a socket's path has at most 107 bytes
#
# Prints `ready PID` when the engine answers at unix://FOLDER/s; PID's network namespace is where it publishes ports.
#
# The engine has a network, processes and mounts of its own. So the machine's addresses, routes and firewall stay
# untouched and nothing gets out; a container among "the host's" processes sees no program but those of this engine; and
# with the first of those processes the kernel ends all of them, containers included, and undoes their mounts.
# Standard input is a pipe from the tests: the kernel closes it however they end. When this script is killed the engine
# is killed with it, and the next script removes what is left on the disk.
set -euo pipefail

work=$1
engine=

# Whatever an engine in folder $1 left, once none of its processes lives any more.
remove() {
    # A cgroup's files are the kernel's, only its folders can be removed: as soon as the last process is gone.
    for _ in $(seq 100); do
        find /sys/fs/cgroup -depth -type d \( -name "${1##*/}" -o -path "*/${1##*/}/*" \) -exec rmdir {} + 2>/dev/null
        [ -n "$(find /sys/fs/cgroup -type d -name "${1##*/}")" ] || break
        sleep 0.1
    done
    if [ -f "$1/outside" ]; then xargs -r -d '\n' rm -rf --one-file-system <"$1/outside"; fi
    rm -rf --one-file-system "$1"
    rm -f "$1.lock"
}

# shellcheck disable=SC2329  # called by the trap
clean_up() {
    trap '' HUP INT TERM
    set +e
    if [ -n "$engine" ]; then
        kill -9 "$engine" 2>/dev/null
        wait "$engine" 2>/dev/null
    fi
    remove "$work"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

# Held by the engine too, for as long as anything of it lives.
exec 9>"$work.lock"
flock 9
set +e
remove_dead() (flock --nonblock 8 && remove "$1") 8>"$1.lock"
for lock in "${work%-*}"-*.lock; do
    if [ "$lock" != "$work.lock" ]; then remove_dead "${lock%.lock}"; fi
done
set -e
# A folder of this name without a lock is nobody's.
rm -rf --one-file-system "$work"
mkdir -m 700 "$work"
# What an engine makes outside its own folders; ours to remove only where no other engine made it before.
for path in /etc/docker/key.json /opt/containerd; do
    if [ ! -e "$path" ]; then echo "$path"; fi
done >"$work/outside"

# A shell gives what it starts in the background another standard input.
exec 3<&0
# The shell inside is the first of the processes. /run: engines keep sockets and locks there, whatever they are told.
# shellcheck disable=SC2016  # expanded by the inner shell
setpriv --pdeathsig KILL unshare --net --mount --pid --fork --kill-child --mount-proc bash -c '
    mount -t tmpfs tmpfs /run && ip link set lo up || exit
    dockerd --data-root "$0/data" --exec-root "$0/exec" --host "unix://$0/s" --pidfile "$0/pid" \
        --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "/${0##*/}" </dev/null >"$0/log" 2>&1 &
    cat <&3 >/dev/null &
    wait -n' "$work" >"$work/started" 2>&1 &
engine=$!

for _ in $(seq 3000); do
    if docker -H "unix://$work/s" version >/dev/null 2>&1; then
        echo "ready $engine"
        wait "$engine"
        exit 0
    fi
    if ! kill -0 "$engine" 2>/dev/null; then break; fi
    sleep 0.1
done
echo "dockerd did not come up:" >&2
tail -n 20 "$work/started" "$work/log" >&2
exit 1
