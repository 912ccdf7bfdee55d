#!/usr/bin/env bash
# Hosts joined by a network of a given speed, on one machine: run an MPI program on them.
#
#   1. a network namespace for the switch (a bridge), and namespaces for every host: network, mount, PID, IPC and UTS,
#      so that hosts have names, addresses, processes and a /dev/shm of their own and share nothing but files
#   2. a cable (veth) from every host to the switch, shaped at both ends
#   3. MPICH's mpirun beside the switch, which enters the hosts through a stand-in for ssh
#
# No namespace has a name and everything in them dies with this shell, so nothing is left behind, not even by SIGKILL.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
SKIPPED=77
PATH=$PATH:/usr/sbin:/sbin

usage() {
    cat <<'TEXT'
usage: benchmarks/network.sh HOSTS RANKS_A_HOST RATE DELAY [-- COMMAND...]
       benchmarks/network.sh --clean

Make HOSTS hosts (host0, host1, ...) joined by a switch and run COMMAND on RANKS_A_HOST ranks of each, for example
    benchmarks/network.sh 4 1 1gbit 50us
    benchmarks/network.sh 2 2 100mbit 0 -- python -m pytest -q tests/test_collectives.py
`python` is the one on the path, and the mpirun is MPICH's beside it. The default COMMAND is
`python benchmarks/network.py`. The exit status is COMMAND's, or 77 (skipped) where there can be no such network:
that takes root, Linux namespaces, iproute2, util-linux and MPICH.

  RATE    of every cable, each way at once, Ethernet headers included: 1gbit, 100mbit, 2.5gbit; 0: as fast as it goes
  DELAY   from one host to any other, one way, on top of what the machine itself takes: 50us, 1ms; 0: none.
          A kernel without netem cannot delay: it is said in a line, and taken to be 0
  --clean remove what runs have left whose shell is dead

COMMAND finds in its environment NETWORK_HOSTS, NETWORK_RATE (bytes a second, 0: no limit), NETWORK_DELAY (seconds),
NETWORK_SHAPER (what limits the cables), and NETWORK_CUT, a program: `$NETWORK_CUT HOST` pulls the cable of a host out
of the switch, `$NETWORK_CUT HOST up` puts it back. Settings of your own (UCX_*, FI_*, MPIR_CVAR_*) win.
TEXT
}

say() { printf 'network: %s\n' "$*" >&2; }
skip() { say "skipped: $*"; exit "$SKIPPED"; }
misuse() { say "$@"; usage >&2; exit 2; }

# ---- arguments -----------------------------------------------------------------------------------

# In bits a second.
read_rate() {
    local exponent
    if [[ $1 == 0 ]]; then echo 0 && return; fi
    [[ $1 =~ ^([0-9]+(\.[0-9]+)?)([kmg]?)bit$ ]] || return 1
    case ${BASH_REMATCH[3]} in
        k) exponent=3 ;;
        m) exponent=6 ;;
        g) exponent=9 ;;
        *) exponent=0 ;;
    esac
    awk "BEGIN { printf \"%.0f\\n\", ${BASH_REMATCH[1]} * 1e$exponent }"
}

# In microseconds.
read_delay() {
    if [[ $1 == 0 ]]; then echo 0 && return; fi
    [[ $1 =~ ^([0-9]+(\.[0-9]+)?)(us|ms|s)$ ]] || return 1
    case ${BASH_REMATCH[3]} in
        us) awk "BEGIN { print ${BASH_REMATCH[1]} }" ;;
        ms) awk "BEGIN { print ${BASH_REMATCH[1]} * 1000 }" ;;
        s) awk "BEGIN { print ${BASH_REMATCH[1]} * 1000000 }" ;;
    esac
}

# ---- what the machine can do ---------------------------------------------------------------------

find_tools() {
    local tool
    [[ $(uname -s) == Linux ]] || skip "namespaces are Linux's"
    [[ $(id -u) == 0 ]] || skip "making a network takes root"
    for tool in ip tc unshare nsenter setpriv awk; do
        command -v "$tool" >/dev/null || skip "there is no $tool (Debian, Ubuntu: install iproute2 and util-linux)"
    done
    unshare --mount --uts --ipc --net --pid --fork true 2>/dev/null || skip "this machine permits no namespaces"
    local python
    python=$(command -v python) || skip "there is no python on the path"
    mpirun=${python%/*}/mpirun
    [[ -x $mpirun ]] || mpirun=$(command -v mpirun) || skip "there is no mpirun"
    [[ $("$mpirun" --version </dev/null 2>&1) == *HYDRA* ]] || skip "$mpirun is not MPICH's"
}

# can_queue KIND OPTION...: whether the kernel knows it; tried on the loopback of a namespace made for that.
can_queue() {
    # shellcheck disable=SC2016  # the inner shell expands it
    unshare --net sh -c 'tc qdisc add dev lo root "$@"' sh "$@" 2>/dev/null
}

# ---- namespaces ----------------------------------------------------------------------------------

# hold OPTION...: a process that keeps new namespaces alive, and that the kernel kills with this shell. Sets held.
hold() {
    NETWORK_BED=$$ setpriv --pdeathsig KILL \
        unshare --kill-child=KILL "$@" sleep infinity </dev/null >/dev/null 2>&1 &
    held=$!
    disown "$held" # no word from bash when it is killed
    holders+=("$held")
    local own made try
    own=$(readlink /proc/self/ns/net)
    for ((try = 0; try < 500; try++)); do
        made=$(readlink "/proc/$held/ns/net") || break
        # Empty until unshare has forked the first process of the new PID namespace.
        if [[ $made != "$own" && -n $(readlink "/proc/$held/ns/pid_for_children") ]]; then return; fi
        sleep 0.01
    done
    skip "this machine permits no namespaces"
}

at_switch() { nsenter --net="/proc/$switch/ns/net" "$@"; }

make_switch() {
    hold --fork --net
    switch=$held
    at_switch sh -euc '
        ip link set lo up
        ip link add switch type bridge stp_state 0 forward_delay 0
        ip addr add 10.77.255.254/16 dev switch
        ip link set switch up'
}

address_of() { echo "10.77.$(($1 / 200)).$(($1 % 200 + 1))"; }

# make_host N: its namespaces, its name, and a cable to the switch.
make_host() {
    local n=$1 enter
    hold --fork --mount --propagation private --uts --ipc --net --pid
    enter="nsenter --target $held --mount --uts --ipc --net --pid=/proc/$held/ns/pid_for_children"
    hosts+=("$enter")
    at_switch ip link add "port$n" type veth peer name eth0 netns "$held"
    # shellcheck disable=SC2086,SC2016  # words are meant; the inner shell expands
    $enter sh -euc '
        mount -t proc proc /proc
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        mount --bind "$1/hosts" /etc/hosts
        echo "host$2" >/proc/sys/kernel/hostname
        if [ -d /proc/sys/net/ipv6 ]; then echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; fi
        ip link set lo up
        ip addr add "$3/16" dev eth0
        ip link set eth0 up
        # What Linux comes with: the machine may have chosen another, which paces by its own idea of the rate.
        ip route replace 10.77.0.0/16 dev eth0 src "$3" congctl cubic 2>/dev/null || true
        ' sh "$folder" "$n" "$(address_of "$n")"
    at_switch ip link set "port$n" master switch up
    shape "$enter" eth0 "$out"
    shape at_switch "port$n" "$in"
}

# shape ENTER DEVICE QUEUE: limit what leaves a device. Packets beyond a few frames are cut up before they queue,
# so that a large one neither passes in one go nor waits to be whole at the switch.
shape() {
    [[ -n $3 ]] || return 0
    # shellcheck disable=SC2086  # words are meant
    $1 ip link set "$2" gso_max_size "$packet"
    # shellcheck disable=SC2086
    $1 tc qdisc add dev "$2" root $3
}

# What limits a cable: out is the host's end, in is the switch's, which limits what several hosts send to one.
# A token bucket lets so many bytes pass at once and then keeps the rate: here those of 65 us, but at least a frame.
# Packets are as large as fits in, because the machine could not handle single frames at the rate. The queue of 1 MiB
# is a switch's.
choose_queues() {
    local bucket burst=$((bits * 65 / 8000000))
    burst=$((burst < 1600 ? 1600 : burst > 65536 ? 65536 : burst))
    packet=$((burst * 12 / 13))
    bucket="tbf rate ${bits}bit burst $burst limit 1048576"
    in='' out='' shaper=none
    if ((bits)); then
        # shellcheck disable=SC2086  # words are meant
        can_queue $bucket || skip "this kernel has no token bucket (tbf)"
        in=$bucket out=$bucket shaper=tbf
    fi
    if [[ $micros != 0 ]]; then
        if can_queue netem delay "${micros}us"; then
            # Delays at the host's end only, so once on the way to any other; its queue holds what is under way too.
            out="netem delay ${micros}us limit 100000"
            if ((bits)); then out+=" rate ${bits}bit"; fi
            shaper=${shaper/tbf/tbf+}netem shaper=${shaper/none/}
        else
            say "this kernel has no netem: cables have no delay but the machine's own"
            micros=0
        fi
    fi
}

# ---- running -------------------------------------------------------------------------------------

# What mpirun calls instead of ssh: HOST COMMAND..., perhaps with options before.
write_programs() {
    local n
    {
        echo '#!/bin/sh'
        echo "while [ \"\${1#-}\" != \"\$1\" ]; do shift; done"
        echo "host=\$1; shift"
        echo "case \$host in"
        for ((n = 0; n < nhosts; n++)); do echo "host$n) exec ${hosts[n]} sh -c \"\$*\" ;;"; done
        echo "esac"
        echo "echo \"network: there is no host \$host\" >&2; exit 1"
    } >"$folder/enter"
    cat >"$folder/cut" <<TEXT
#!/bin/sh
# cut HOST [up]: done when this returns.
if ! grep -q " \$1\$" "$folder/hosts"; then echo "network: there is no host \$1" >&2; exit 1; fi
state=\${2:-down}
rm -f "$folder/\$1.\$state"
echo "\$1 \$state" >"$folder/orders"
while [ ! -e "$folder/\$1.\$state" ] && [ -e "$folder/orders" ]; do sleep 0.01; done
TEXT
    chmod +x "$folder/enter" "$folder/cut"
}

# obey: pulls cables when $NETWORK_CUT asks for it: hosts themselves cannot reach the switch.
obey() {
    mkfifo "$folder/orders"
    # shellcheck disable=SC2016  # the inner shell expands
    NETWORK_BED=$$ setpriv --pdeathsig KILL nsenter --net="/proc/$switch/ns/net" sh -c '
        while read -r host state; do
            ip link set "port${host#host}" "$state" && : >"$1/$host.$state"
        done' sh "$folder" <>"$folder/orders" &
    helpers+=("$!")
}

run() {
    local n names=()
    for ((n = 0; n < nhosts; n++)); do names+=("host$n:$nranks"); done
    export NETWORK_BED=$$ NETWORK_CUT=$folder/cut NETWORK_HOSTS=$nhosts NETWORK_SHAPER=$shaper
    NETWORK_RATE=$((bits / 8))
    NETWORK_DELAY=$(awk "BEGIN { print $micros * 1e-6 }")
    export NETWORK_RATE NETWORK_DELAY
    # Ranks of one host use MPICH's shared memory, others the cable.
    export UCX_TLS=${UCX_TLS:-tcp,self} UCX_NET_DEVICES=${UCX_NET_DEVICES:-eth0}
    export FI_PROVIDER=${FI_PROVIDER:-tcp} FI_TCP_IFACE=${FI_TCP_IFACE:-eth0}
    setpriv --pdeathsig KILL nsenter --net="/proc/$switch/ns/net" \
        "$mpirun" -launcher ssh -launcher-exec "$folder/enter" -iface switch \
        -hosts "$(IFS=, && echo "${names[*]}")" -n $((nhosts * nranks)) "${command[@]}" </dev/null &
    job=$!
    helpers+=("$job")
    local status=0
    wait "$job" || status=$?
    exit "$status"
}

# shellcheck disable=SC2317  # a trap calls it
cleanup() {
    local pid
    trap '' INT TERM HUP
    exec 2>/dev/null # no word from bash about what is killed
    for pid in "${helpers[@]}" "${holders[@]}"; do kill -KILL "$pid" || true; done
    wait || true
    if [[ -n $folder ]]; then rm -rf "$folder"; fi
}

# Runs whose shell is dead leave a folder, and at worst processes that carry its number.
clean() {
    local found pid
    for found in "${TMPDIR:-/tmp}"/pyreduce-network.*; do
        [[ -d $found ]] || continue
        pid=${found##*/pyreduce-network.} pid=${pid%%.*}
        if ! is_bed "$pid"; then rm -rf "$found"; fi
    done
    for found in /proc/[0-9]*; do
        pid=$( (tr '\0' '\n' <"$found/environ") 2>/dev/null | sed -n 's/^NETWORK_BED=//p') || continue
        if [[ -n $pid && ${found#/proc/} != "$$" ]] && ! is_bed "$pid"; then
            kill -KILL "${found#/proc/}" 2>/dev/null || true
        fi
    done
}

is_bed() { [[ $( (tr '\0' ' ' <"/proc/$1/cmdline") 2>/dev/null) == *network.sh* ]]; }

if [[ ${1:-} == --clean ]]; then clean && exit; fi
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage && exit; fi
(($# >= 4)) || misuse "HOSTS RANKS_A_HOST RATE DELAY are needed"
nhosts=$1 nranks=$2
[[ $nhosts =~ ^[1-9][0-9]{0,2}$ ]] || misuse "HOSTS is 1 to 999, not '$nhosts'"
[[ $nranks =~ ^[1-9][0-9]{0,2}$ ]] || misuse "RANKS_A_HOST is 1 to 999, not '$nranks'"
bits=$(read_rate "$3") || misuse "RATE is like 1gbit, 100mbit or 0, not '$3'"
micros=$(read_delay "$4") || misuse "DELAY is like 50us, 1ms or 0, not '$4'"
shift 4
if (($#)); then
    [[ $1 == -- ]] || misuse "COMMAND comes after --"
    shift
fi
command=("$@")
if ((!$#)); then command=(python "$here/network.py"); fi

find_tools
choose_queues
holders=() helpers=() hosts=() folder=''
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
folder=$(mktemp -d "${TMPDIR:-/tmp}/pyreduce-network.$$.XXXXXX")
echo '127.0.0.1 localhost' >"$folder/hosts"
for ((n = 0; n < nhosts; n++)); do echo "$(address_of "$n") host$n" >>"$folder/hosts"; done
make_switch
for ((n = 0; n < nhosts; n++)); do make_host "$n"; done
write_programs
obey
run
