# Sourced by local_slurm.sh: write_conf makes slurm.conf, gres.conf, cgroup.conf, slurmdbd.conf, hosts,
# settings (what `up` was told) and env.sh (what points a shell at the cluster) below $DIR.
# shellcheck shell=bash disable=SC2154

write_conf() {
  local host me here=127.0.0.1; host=$(hostname -s 2>/dev/null || hostname); me=$(id -un)
  [ "$ISOLATE" != net ] || here=$(subnet eth).1
  mkdir -p "$DIR"/{etc,run,log,state,spool,dev}
  chmod 755 "$DIR" "$DIR/run"; chmod 700 "$DIR/state"
  local i; for i in $(seq "$NODES"); do mkdir -p "$DIR/spool/n$i" "$DIR/tmp/n$i"; done   # slurmd wants it at first start

  { cat <<CONF
# written by local_slurm.sh
ClusterName=local
SlurmctldHost=$host($here)
SlurmctldPort=$PORT
SlurmUser=$me
SlurmdUser=$me
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
# per-node TmpFS: the pmix plugin makes \$TmpFS/spmix_appdir_<uid>_<job>.<step>, and with the default /tmp
# two virtual nodes of one step collide ("Cannot create directory ... File exists", step launch fails)
TmpFS=$DIR/tmp/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true
# --- nothing here needs cgroups or systemd
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
MpiDefault=none
# --- resources: fake CPUs/memory/GPUs are accepted because of config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
DefMemPerCPU=100
GresTypes=gpu
# --- fast scheduling for tests (hetjobs are started ONLY by the backfill scheduler)
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,sched_interval=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a preempted job of partition "low" gets its --signal (submitit: USR2) at once and GraceTime to checkpoint
SlurmctldParameters=preempt_send_user_signal
# --- short time-outs
JobRequeue=1
KillWait=2
# finished jobs stay visible to squeue --states=all / scontrol show job this long (default 300)
MinJobAge=7200
CompleteWait=0
InactiveLimit=0
OverTimeLimit=0
MessageTimeout=10
SlurmdTimeout=10
SlurmctldTimeout=5
BatchStartTimeout=20
ReturnToService=2
HealthCheckInterval=0
TCPTimeout=2
# seconds that srun gives a step once a task of it has ended, unless it says otherwise itself
WaitTime=2
MaxArraySize=1001
CONF
    if [ "$AUTH" = munge ]; then
      echo "AuthType=auth/munge"; echo "CredType=cred/munge"
      # cred_expire is also how long a requeued job waits before it may start again (default 120 s; below 5 is
      # invalid and silently means 120)
      echo "AuthInfo=socket=$DIR/run/munge.socket,cred_expire=5"
    else
      echo "AuthType=auth/none"; echo "CredType=cred/none"; echo "AuthInfo=cred_expire=5"
    fi
    [ -n "$GPUPREFIX" ] && echo "TaskProlog=$DIR/etc/task_prolog.sh"
    if [ "$ACCT" = dbd ]; then
      echo "AccountingStorageType=accounting_storage/slurmdbd"
      echo "AccountingStorageHost=127.0.0.1"; echo "AccountingStoragePort=$((PORT+1))"
      [ "$AUTH" = munge ] && echo "AccountingStoragePass=$DIR/run/munge.socket"
      echo "AccountingStorageTRES=gres/gpu"
    else
      echo "AccountingStorageType=accounting_storage/none"
    fi
    echo "JobCompType=jobcomp/filetxt"; echo "JobCompLoc=$DIR/log/jobcomp.log"
    local gres=""; [ "$GPUS" -gt 0 ] && gres="Gres=gpu:$GPUS"
    for i in $(seq "$NODES"); do
      local at=$here; [ "$ISOLATE" != net ] || at=$(subnet eth).$((i+1))
      echo "NodeName=n$i NodeHostname=$host NodeAddr=$at Port=$((PORT+10+i)) Sockets=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEM $gres State=UNKNOWN"
    done
    local half=$(( (NODES+1)/2 ))
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10"
    echo "PartitionName=left Nodes=n[1-$half] MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10"
    [ "$NODES" -gt "$half" ] && echo "PartitionName=right Nodes=n[$((half+1))-$NODES] MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10"
    echo "PartitionName=low Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15"
    [ -n "$EXTRA" ] && cat "$EXTRA"
    true
  } > "$DIR/etc/slurm.conf"

  # seen as /etc/hosts by slurmctld and inside the virtual nodes (isolation modes shm and net): every node name
  # resolves to its own address (with shm of loopback), so programs that bind to / connect to a node's host name
  # work. With net a node takes itself for 127.0.1.1, as Debian's do.
  cp /etc/hosts "$DIR/etc/hosts"
  for i in $(seq "$NODES"); do
    if [ "$ISOLATE" = net ]; then echo "$(subnet eth).$((i+1)) n$i"; else echo "127.1.$((i/250)).$((i%250+1)) n$i"; fi
  done >> "$DIR/etc/hosts"
  for i in $(seq "$NODES"); do
    if [ "$ISOLATE" = net ]; then sed "s/.* n$i\$/127.0.1.1 n$i/" "$DIR/etc/hosts"; else cat "$DIR/etc/hosts"; fi > "$DIR/etc/hosts.n$i"
  done

  rm -f "$DIR/bin/sacct"
  if [ "$ACCT" = shim ]; then
    mkdir -p "$DIR/bin"; cp "$HERE/sacct_shim.py" "$DIR/bin/sacct"; chmod 755 "$DIR/bin/sacct"
    # Where python3 is itself a script that looks for one (pyenv), that takes three quarters of the time.
    if /usr/bin/python3 -IS "$DIR/bin/sacct" --help >/dev/null 2>&1; then
      sed -i '1s|.*|#!/usr/bin/python3 -IS|' "$DIR/bin/sacct"
    fi
  fi

  : > "$DIR/etc/gres.conf"
  if [ "$GPUS" -gt 0 ] && [ -n "$GPUPREFIX" ]; then
    # Slurm numbers CUDA_VISIBLE_DEVICES from 0 within a node, whatever the device files are called; all virtual nodes
    # of one host see the same GPUs, so the numbers are shifted by the node's share before each task starts.
    cat > "$DIR/etc/task_prolog.sh" <<CONF
#!/bin/bash
[ -n "\$CUDA_VISIBLE_DEVICES" ] || exit 0
off=\$(( (\${SLURMD_NODENAME#n} - 1) * $GPUS )); out=""
for d in \${CUDA_VISIBLE_DEVICES//,/ }; do out="\$out,\$((d + off))"; done
echo "export CUDA_VISIBLE_DEVICES=\${out#,}"
CONF
    chmod 755 "$DIR/etc/task_prolog.sh"
    for i in $(seq "$NODES"); do
      local a=$(( (i-1)*GPUS )) b=$(( i*GPUS-1 )) r; r="[$a-$b]"; [ $a -eq $b ] && r=$a
      [ -e "$GPUPREFIX$b" ] || die "no $GPUPREFIX$b: fewer GPUs than nodes x gpus-per-node"
      echo "NodeName=n$i Name=gpu File=$GPUPREFIX$r" >> "$DIR/etc/gres.conf"
    done
  elif [ "$GPUS" -gt 0 ]; then
    # A gpu gres without File= is NOT accepted (count stays 0). Character devices are wanted; a plain
    # file works too but logs an error per file at every slurmd start.
    for i in $(seq 0 $((GPUS-1))); do
      [ -e "$DIR/dev/gpu$i" ] || mknod "$DIR/dev/gpu$i" c 1 3 2>/dev/null || : > "$DIR/dev/gpu$i"
    done
    local last=$((GPUS-1)) range="[0-$((GPUS-1))]"; [ $last -eq 0 ] && range=0
    echo "NodeName=n[1-$NODES] Name=gpu File=$DIR/dev/gpu$range" >> "$DIR/etc/gres.conf"
  fi
  # Naming the plugin skips the autodetection, which ends slurmd where /sys/fs/cgroup is not mounted ("Unable to
  # initialize cgroup plugin") and asks for systemd/dbus under cgroup v2. Unused with proctrack/linuxproc anyway.
  cat > "$DIR/etc/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
ConstrainCores=no
ConstrainDevices=no
ConstrainRAMSpace=no
CONF
  if [ "$ACCT" = dbd ]; then
    [ -f "$DIR/run/dbpass" ] || { head -c 12 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$DIR/run/dbpass"; chmod 600 "$DIR/run/dbpass"; }
    cat > "$DIR/etc/slurmdbd.conf" <<CONF
AuthType=auth/$AUTH
$( [ "$AUTH" = munge ] && echo "AuthInfo=socket=$DIR/run/munge.socket" )
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((PORT+1))
SlurmUser=$me
DebugLevel=info
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT+2))
StorageLoc=slurm_acct
StorageUser=slurm
StoragePass=$(cat "$DIR/run/dbpass")
CommitDelay=0
CONF
    chmod 600 "$DIR/etc/slurmdbd.conf"
  fi
  {
    for v in NODES CPUS MEM GPUS ACCT AUTH PORT PROCTRACK EXTRA ISOLATE GPUPREFIX; do printf '%s=%q\n' $v "${!v}"; done
  } > "$DIR/settings"
  {
    echo "export SLURM_CONF=$DIR/etc/slurm.conf"
    # every node is this machine; Open MPI 5 finds no way from one to the next by an address that both have
    [ "$ISOLATE" = net ] || echo "export OMPI_MCA_btl_tcp_if_include=lo"
    # client commands read AuthInfo from slurm.conf; munge/unmunge by hand need -S <socket>
    if [ "$ACCT" = shim ]; then echo "export PATH=$DIR/bin:\$PATH"; fi     # after (= in front of) the real sacct
  } > "$DIR/env.sh"
}
