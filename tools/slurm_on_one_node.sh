#!/bin/bash
# Run a command beside a SLURM of its own: one node, this machine, on the loopback interface.
#
#   tools/slurm_on_one_node.sh COMMAND [ARGUMENT...]
#
# Needs munged, slurmctld, slurmd and sbatch (Debian: apt install slurmctld slurmd slurm-client
# munge), neither systemd nor any configuration of the machine. Daemons, their state and logs live in
# a temporary folder, are stopped and removed with the command's end; its exit code is this one's.
# KEEP=1 leaves the folder. Jobs run as the user who calls this.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" > /dev/null || {
        echo "$program is missing (Debian: apt install slurmctld slurmd slurm-client munge)" >&2
        exit 1
    }
done
[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }

here=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
chmod 755 "$here"
mkdir "$here"/{state,spool,munge}
user=$(id -un)
host=$(hostname -s)
pids=()

stop() {
    code=$?
    trap - EXIT
    scancel --user "$user" 2> /dev/null || true
    for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2> /dev/null || true; done
    if [ -n "${KEEP:-}" ]; then echo "kept: $here" >&2; else rm -rf "$here"; fi
    exit "$code"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

free_port() { # one that nothing listens on
    while :; do
        port=$((20000 + RANDOM))
        (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null || { echo "$port"; return; }
    done
}

(umask 077; head -c 1024 /dev/urandom > "$here/munge/key")
munged --foreground --force --key-file="$here/munge/key" --socket="$here/munge/socket" \
    --pid-file="$here/munge/pid" --log-file="$here/munge/log" --seed-file="$here/munge/seed" \
    > /dev/null 2>&1 &
pids+=($!)

# A requeued job waits as long as a credential lives (cred_expire): two minutes by default.
cat > "$here/slurm.conf" << CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$here/munge/socket,cred_expire=20
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool
SlurmctldPidFile=$here/slurmctld.pid
SlurmdPidFile=$here/slurmd.pid
SlurmctldLogFile=$here/slurmctld.log
SlurmdLogFile=$here/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=5
$(slurmd -C | sed -n 's/ UpTime.*//; s/^NodeName=[^ ]*/NodeName='"$host"' NodeAddr=127.0.0.1/p')
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$here/slurm.conf

slurmctld -D -f "$SLURM_CONF" > "$here/slurmctld.out" 2>&1 &
pids+=($!)
slurmd -D -f "$SLURM_CONF" -N "$host" > "$here/slurmd.out" 2>&1 &
pids+=($!)

for _ in $(seq 60); do
    [ "$(sinfo --noheader --format=%t 2> /dev/null)" = idle ] && break
    sleep 1
done
if [ "$(sinfo --noheader --format=%t 2> /dev/null)" != idle ]; then
    echo "SLURM did not start:" >&2
    tail -n 5 "$here"/*.out "$here"/*.log "$here"/munge/log >&2 || true
    exit 1
fi
echo "SLURM $(sinfo --version | cut -d' ' -f2) runs on $host"
"$@"
