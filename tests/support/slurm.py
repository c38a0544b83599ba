"""A Slurm of one machine for tests: daemons, key, ports and state of its own, beside any other."""

import getpass
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.launch import ROOT, environment

SCRIPTS = ROOT / "launch" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
"""With the folders of daemons, which a user's PATH may lack."""
NODES = ("one", "two")
"""Two on this machine: Slurm starts the parts of a heterogeneous job on different nodes."""
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}
PAUSE_S = 0.2
"""Between two looks at a state."""

CONFIG = """
ClusterName=hpcvfl-tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
# Not the same twice: MPICH names shared memory after the job, and what is killed leaves it.
FirstJobId={first_job}
AuthType=auth/munge
# cred_expire: seconds until a job that was requeued may start again (default 120).
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
# So that a forgotten --mpi shows.
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
# Minutes that a job may go on after its limit: a test waits for the signal before it.
OverTimeLimit=5
MinJobAge=3600
# More cores than the machine may have: five ranks are started there as on a large node.
SlurmdParameters=config_overrides
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=16000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=16000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=hasty Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing():
    """The programs of Slurm and munge that are not there, as words; "" if none."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=PATH) is None)


def until(condition, timeout_s, said):
    """Wait until condition(); AssertionError with said() after timeout_s."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {said()}"
        time.sleep(PAUSE_S)


def free_ports(count):
    """Ports of this host that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Slurm:
    """munged, slurmctld and a slurmd a node, from `start` to `stop`; all files are in `folder`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._daemons = {}

    def start(self):
        """Start all, until both nodes take jobs."""
        (self.folder / "state").mkdir()
        host = platform.node().partition(".")[0]
        text = CONFIG.format(
            folder=self.folder,
            host=host,
            user=getpass.getuser(),
            ports=free_ports(3),
            first_job=secrets.randbelow(60_000_000) + 1,
        )
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        names = ("socket", "pid", "log", "seed")
        files = {name: self.folder / f"munge.{name}" for name in names}
        # --force: a folder of one's own is no place for the socket of a whole system.
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}",
            f"--socket={files['socket']}", f"--pid-file={files['pid']}",
            f"--log-file={files['log']}", f"--seed-file={files['seed']}",
        )  # fmt: skip
        until(files["socket"].exists, 20, self.logs)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        until(self._ready, 60, self.logs)

    def _daemon(self, program, *words):
        """Start one that ends with this process, however that ends."""
        log = (self.folder / f"{program}{len(self._daemons)}.out").open("w")
        with log:
            self._daemons[program, words] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", shutil.which(program, path=PATH), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(),
                start_new_session=True,  # an interrupt from the terminal is for the tests alone
            )  # fmt: skip

    def _environment(self, **variables):
        return environment(
            **{
                "PATH": PATH,
                "SLURM_CONF": str(self.folder / "slurm.conf"),
                "HPCVFL_PYTHON": sys.executable,
            }
            | variables
        )

    def _ready(self):
        for (program, _), process in self._daemons.items():
            assert process.poll() is None, f"{program} has ended: {self.logs()}"
        nodes = self.run("scontrol", "--oneliner", "show", "nodes", check=False)
        return nodes.stdout.count("State=IDLE ") == len(NODES)

    def stop(self):
        """End all jobs, then the daemons."""
        try:
            if self._daemons:
                self.run("scancel", "--user", getpass.getuser(), check=False)
                until(lambda: not self.run("squeue", "-h").stdout.strip(), 60, self.logs)
        finally:
            for process in reversed(self._daemons.values()):
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._daemons.clear()

    def logs(self):
        """The last lines of every log of the daemons."""
        parts = []
        for path in sorted(self.folder.glob("*.out")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"-- {path.name}", *lines]))
        return "\n".join(parts)

    def run(self, *words, timeout_s=60, check=True, **variables):
        """A finished command of Slurm, with stdout and stderr as text."""
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=False,
            env=self._environment(**variables),
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}{self.logs()}"
        return done

    def submit(self, folder, options, *words, **variables):
        """Submit a script of launch/slurm with its words, or a command after --wrap, to run in
        `folder`; the number of the job.
        """
        if words[0] != "--wrap":
            words = (str(SCRIPTS / words[0]), *words[1:])
        command = ["sbatch", "--parsable", f"--chdir={folder}", *options, *words]
        return self.run(*command, **variables).stdout.strip()

    def jobs(self, job):
        """{name: value} of the job, of each member of an array, of each part of a heterogeneous
        one.
        """
        said = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        lines = [line for line in said.splitlines() if line.strip()]
        return [dict(w.split("=", 1) for w in line.split() if "=" in w) for line in lines]

    def wait(self, job, timeout_s=200):
        """The same after all of them have ended."""
        found = []

        def ended():
            found[:] = self.jobs(job)
            return all(one["JobState"] not in RUNNING for one in found)

        until(ended, timeout_s, lambda: self.told(job))
        return found

    def told(self, job):
        """States and output of a job, for a message."""
        parts = []
        for one in self.jobs(job):
            words = [f"{k}={one.get(k)}" for k in ("JobId", "JobState", "Reason", "Restarts")]
            parts.append(" ".join(words))
            path = Path(one.get("StdOut", "/none"))
            parts.append(path.read_text(errors="replace") if path.is_file() else "no output")
        return "\n".join([*parts, self.logs()])
