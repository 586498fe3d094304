#!/usr/bin/env bash
# local_slurm.sh - a REAL multi-node Slurm cluster on one machine, without systemd.
#
#   local_slurm.sh up     [options]     start (idempotent: a healthy cluster is left alone)
#   local_slurm.sh down                 stop every daemon this script started, by pid file
#   local_slurm.sh status               daemons + sinfo; exit 0 only if everything is alive
#   local_slurm.sh env                  print shell code:  eval "$(local_slurm.sh env)"
#   local_slurm.sh clean                down + remove the state directory
#   local_slurm.sh node-kill  NAME      kill -9 the slurmd of NAME only: running steps live on
#   local_slurm.sh node-crash NAME      kill -9 the slurmd AND every process of its jobs: a power cut
#   local_slurm.sh node-start NAME      start that slurmd again
#   local_slurm.sh ctld-kill | ctld-start   the same for slurmctld (state is recovered)
#
# Options (for `up`; the environment variable in brackets gives the default):
#   --dir DIR            state directory                 [LSLURM_DIR, ${TMPDIR:-/tmp}/local_slurm]
#   --nodes N            virtual nodes n1..nN            [LSLURM_NODES, 4]
#   --cpus C             (fake) CPUs per node            [LSLURM_CPUS, 8]
#   --mem MB             (fake) memory per node          [LSLURM_MEM, 16000]
#   --gpus-per-node G    (fake) GPUs per node            [LSLURM_GPUS, 4]
#   --gpu-prefix PATH    real GPUs: node i gets PATH<(i-1)*G> ... PATH<i*G-1>, e.g. /dev/nvidia with 4 nodes of 2;
#                        CUDA_VISIBLE_DEVICES then holds the real indices  [LSLURM_GPU_PREFIX, empty = fake]
#   --accounting MODE    none | shim | dbd               [LSLURM_ACCT, shim]
#                        dbd  = slurmdbd + a private mariadbd: the real `sacct` (+2 s, first time +6 s)
#                        shim = sacct_shim.py goes first on PATH (after `env`): enough for submitit
#                        none = sacct says "Slurm accounting storage is disabled"
#   --auth MODE          munge | none (none: single-user sandbox without munge) [LSLURM_AUTH, munge]
#   --port-base P        first of the TCP ports used on 127.0.0.1; auto looks for free ones
#                        [LSLURM_PORT_BASE, auto]
#   --proctrack T        linuxproc | pgid | cgroup       [LSLURM_PROCTRACK, linuxproc]
#   --isolate MODE       none | uts | shm | net | auto: uts gives each virtual node its own hostname (n1, ...),
#                        shm adds a private /dev/shm and an /etc/hosts that knows n1..nN; auto = shm, else uts, else none, whichever this
#                        sandbox permits; net (asked for by name, root only) adds a network namespace with eth0 (slow; Slurm's), ib0 (fast)
#                        and docker0 (a wrong one: the same address on every node) and a route to nowhere else. With none all nodes share one hostname and /dev/shm, and Open MPI 4
#                        ranks of different nodes crash into each other's vader segments unless
#                        OMPI_MCA_btl=self,tcp.              [LSLURM_ISOLATE, auto]
#   --extra FILE         file appended to slurm.conf     [LSLURM_EXTRA]
#
# Layout of the state directory: etc/ (slurm.conf, gres.conf, ...) run/ (pids, sockets, munge key)
# log/ state/ (slurmctld StateSaveLocation) spool/<node>/ dev/ (fake GPU device files) db/.
# Slurm state survives down/up; use `clean` to forget jobs.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

CMD=${1:-help}; [ $# -gt 0 ] && shift
ARG=""
DIR=${LSLURM_DIR:-${TMPDIR:-/tmp}/local_slurm}
NODES=${LSLURM_NODES:-4}
CPUS=${LSLURM_CPUS:-8}
MEM=${LSLURM_MEM:-16000}
GPUS=${LSLURM_GPUS:-4}
ACCT=${LSLURM_ACCT:-shim}
AUTH=${LSLURM_AUTH:-munge}
PORT=${LSLURM_PORT_BASE:-auto}
PROCTRACK=${LSLURM_PROCTRACK:-linuxproc}
EXTRA=${LSLURM_EXTRA:-}
ISOLATE=${LSLURM_ISOLATE:-auto}
GPUPREFIX=${LSLURM_GPU_PREFIX:-}
while [ $# -gt 0 ]; do
  case $1 in
    --dir) DIR=$2; shift 2;;
    --nodes) NODES=$2; shift 2;;
    --cpus) CPUS=$2; shift 2;;
    --mem) MEM=$2; shift 2;;
    --gpus-per-node) GPUS=$2; shift 2;;
    --accounting) ACCT=$2; shift 2;;
    --auth) AUTH=$2; shift 2;;
    --port-base) PORT=$2; shift 2;;
    --proctrack) PROCTRACK=$2; shift 2;;
    --extra) EXTRA=$2; shift 2;;
    --isolate) ISOLATE=$2; shift 2;;
    --gpu-prefix) GPUPREFIX=$2; shift 2;;
    -*) echo "unknown option $1" >&2; exit 2;;
    *) ARG=$1; shift;;
  esac
done
DIR=$(mkdir -p "$DIR" && cd "$DIR" && pwd)
[ -z "$EXTRA" ] || EXTRA=$(cd "$(dirname "$EXTRA")" && pwd)/$(basename "$EXTRA")
# Settings of the last `up` win for every other command, so that down/status/node-kill need no options.
if [ "$CMD" != up ] && [ -f "$DIR/settings" ]; then . "$DIR/settings"; fi

say() { echo "local_slurm: $*" >&2; }
die() { say "$*"; exit 1; }

# --- where the binaries are
setup_paths() {
  export PATH=$PATH:/usr/sbin:/sbin
  SLURMD=$(command -v slurmd || true); SLURMCTLD=$(command -v slurmctld || true)
  SLURMDBD=$(command -v slurmdbd || true); MUNGED=$(command -v munged || true)
  MARIADBD=$(command -v mariadbd || true)
  export SLURM_CONF=$DIR/etc/slurm.conf
}

alive() { # alive PIDFILE NAME: is the process of this pid file alive, and is it what we think it is?
  local p; p=$(cat "$1" 2>/dev/null) || return 1
  [ -n "$p" ] && [ -d "/proc/$p" ] && grep -q "$2" "/proc/$p/comm" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$p/status"
}
stop_pid() { # stop_pid PIDFILE NAME [signal]
  alive "$1" "$2" || { rm -f "$1"; return 0; }
  local p; p=$(cat "$1"); kill "-${3:-TERM}" "$p" 2>/dev/null || true
  for _ in $(seq 100); do [ -d "/proc/$p" ] && ! grep -q '^State:.Z' "/proc/$p/status" 2>/dev/null || break; sleep 0.05; done
  if [ -d "/proc/$p" ] && ! grep -q '^State:.Z' "/proc/$p/status" 2>/dev/null; then kill -9 "$p" 2>/dev/null || true; fi
  rm -f "$1"
}
wait_for() { # wait_for SECONDS WHAT command...
  local n=$(( $1 * 20 )) what=$2; shift 2
  while ! "$@" >/dev/null 2>&1; do n=$((n-1)); [ $n -gt 0 ] || { say "timeout: $what"; return 1; }; sleep 0.05; done
}

taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
ports_free() { # ports_free BASE: slurmctld, slurmdbd, mariadbd, then one port per node
  local p; for p in "$1" $(($1+1)) $(($1+2)) $(seq $(($1+11)) $(($1+10+NODES))); do taken "$p" && return 1; done; return 0
}
choose_ports() {
  if [ "$PORT" = auto ]; then
    local try; for try in $(seq 50); do
      PORT=$((12000 + RANDOM % 18000))      # below the range from which the kernel picks client ports
      ports_free "$PORT" && return 0
    done
    die "no free ports found"
  fi
  ports_free "$PORT" || die "ports from $PORT are taken: use another --port-base, or auto"
}

. "$HERE/local_slurm_conf.sh"     # write_conf

# --- networks of --isolate net: the bridges' names and the subnets come from the cluster's port
netns() { echo "lsl$PORT$1"; }
subnet() { # subnet WHICH: the first three bytes of eth's or ib's addresses; the host of slurmctld is .1, node nI is .(I+1)
  local place=0; [ "$1" = eth ] || place=1
  echo "10.$((64 + PORT % 128)).$(((PORT / 128) % 100 * 2 + place))"
}
bridge_up() { # bridge_up WHICH, once
  ! ip link show "lsl$PORT$1" >/dev/null 2>&1 || return 0
  ip link add "lsl$PORT$1" type bridge
  ip address add "$(subnet "$1").1/24" dev "lsl$PORT$1"
  ip link set "lsl$PORT$1" up
}
node_net() { # node_net NAME: its namespace, once
  local name; name=$(netns "$1")
  [ ! -e "/run/netns/$name" ] || return 0
  ip netns add "$name"
  ip -n "$name" link set lo up
  local each; for each in eth ib; do
    ip link add "lsl$PORT${each:0:1}${1#n}" master "lsl$PORT$each" type veth peer name "${each}0" netns "$name"
    ip link set "lsl$PORT${each:0:1}${1#n}" up
    ip -n "$name" address add "$(subnet $each).$((${1#n} + 1))/24" dev "${each}0"
    ip -n "$name" link set "${each}0" up
  done
  ip -n "$name" link add docker0 type veth peer name nobody
  ip -n "$name" address add 172.17.0.1/16 dev docker0
  ip -n "$name" link set docker0 up
  ip -n "$name" link set nobody up
  # 1 Gbit/s and half a millisecond, where the kernel can shape
  ip netns exec "$name" tc qdisc add dev eth0 root netem rate 1gbit delay 0.5ms 2>/dev/null || true
}
nets_down() {
  [ "$ISOLATE" = net ] || return 0
  local i; for i in $(seq "$NODES"); do ip netns delete "$(netns "n$i")" 2>/dev/null || true; done
  ip link delete "lsl${PORT}eth" 2>/dev/null || true
  ip link delete "lsl${PORT}ib" 2>/dev/null || true
}

# --- daemons
start_munge() {
  [ "$AUTH" = munge ] || return 0
  alive "$DIR/run/munged.pid" munged && return 0
  [ -x "$MUNGED" ] || die "munged is not installed"
  [ -f "$DIR/run/munge.key" ] || ( umask 077; head -c 128 /dev/urandom > "$DIR/run/munge.key" )
  rm -f "$DIR/run/munge.socket" "$DIR/run/munge.socket.lock"
  # --force: accept a state directory below a world-writable /tmp (checks become warnings)
  "$MUNGED" --force --num-threads=4 --socket="$DIR/run/munge.socket" --key-file="$DIR/run/munge.key" \
     --pid-file="$DIR/run/munged.pid" --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munge.seed" \
     2>>"$DIR/log/munged.err" || die "munged did not start (see $DIR/log/munged.err)"
  wait_for 5 "munge socket" test -S "$DIR/run/munge.socket"
}
start_db() {
  [ "$ACCT" = dbd ] || return 0
  local me; me=$(id -un)
  if ! alive "$DIR/run/mariadbd.pid" mariadbd; then
    [ -x "$MARIADBD" ] || die "mariadbd is not installed"
    if [ ! -d "$DIR/db/mysql" ]; then
      mkdir -p "$DIR/db"
      mariadb-install-db --no-defaults --datadir="$DIR/db" --user="$me" --auth-root-authentication-method=normal \
        --skip-test-db >"$DIR/log/mariadb-install.log" 2>&1 || die "mariadb-install-db failed"
    fi
    "$MARIADBD" --no-defaults --datadir="$DIR/db" --user="$me" --socket="$DIR/run/mariadb.sock" \
      --pid-file="$DIR/run/mariadbd.pid" --bind-address=127.0.0.1 --port=$((PORT+2)) --skip-name-resolve \
      --innodb-buffer-pool-size=64M --innodb-log-file-size=32M --innodb-lock-wait-timeout=900 \
      --innodb-flush-log-at-trx-commit=0 --performance-schema=off --skip-log-bin \
      >"$DIR/log/mariadbd.log" 2>&1 </dev/null &
    disown
    wait_for 30 "mariadbd" mariadb-admin --no-defaults --socket="$DIR/run/mariadb.sock" -u root ping || die "see $DIR/log/mariadbd.log"
    mariadb --no-defaults --socket="$DIR/run/mariadb.sock" -u root <<SQL
CREATE DATABASE IF NOT EXISTS slurm_acct;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '$(cat "$DIR/run/dbpass")';
GRANT ALL ON slurm_acct.* TO 'slurm'@'127.0.0.1';
SQL
  fi
  if ! alive "$DIR/run/slurmdbd.pid" slurmdbd; then
    [ -x "$SLURMDBD" ] || die "slurmdbd is not installed"
    # slurmdbd looks for slurmdbd.conf beside the file that SLURM_CONF names
    "$SLURMDBD" || die "slurmdbd did not start"
    wait_for 20 "slurmdbd" sacctmgr -n -i list cluster || die "see $DIR/log/slurmdbd.log"
  fi
  if ! sacctmgr -n -P list cluster format=cluster | grep -qx local; then
    sacctmgr -i add cluster local >/dev/null
    sacctmgr -i add account default cluster=local >/dev/null
    sacctmgr -i add user "$me" account=default cluster=local >/dev/null
  fi
}
isolation() { # prints net, shm, uts or none: --isolate, or what of it this sandbox permits
  if [ "$ISOLATE" != auto ]; then echo "$ISOLATE"
  elif unshare --mount --uts sh -c 'hostname x && mount -t tmpfs tmpfs /dev/shm' 2>/dev/null; then echo shm
  elif unshare --uts hostname x 2>/dev/null; then echo uts
  else echo none; fi
}
start_ctld() {
  alive "$DIR/run/slurmctld.pid" slurmctld && return 0
  [ -x "$SLURMCTLD" ] || die "slurmctld is not installed"
  # since Slurm 23 it looks up the host name of an srun that it has something to tell; those of nodes are ours
  local wrap=()
  case $(isolation) in shm|net) wrap=(unshare --mount sh -c "mount --bind '$DIR/etc/hosts' /etc/hosts; exec \"\$@\"" sh);; esac
  "${wrap[@]}" "$SLURMCTLD" 2>>"$DIR/log/slurmctld.err" || die "slurmctld did not start (see $DIR/log/slurmctld.err)"
  wait_for 15 "slurmctld" scontrol ping
}
start_node() { # start_node NAME
  alive "$DIR/run/slurmd.$1.pid" slurmd && return 0
  [ -x "$SLURMD" ] || die "slurmd is not installed"
  # jobs and steps inherit the namespaces of their slurmd
  local wrap=() mode; mode=$(isolation)
  case $mode in
    shm|net) wrap=(unshare --mount --uts sh -c "hostname $1; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; mount --bind '$DIR/etc/hosts.$1' /etc/hosts; exec \"\$@\"" sh);;
    uts) wrap=(unshare --uts sh -c "hostname $1; exec \"\$@\"" sh);;
    none) ;;
    *) die "--isolate $mode?";;
  esac
  [ "$mode" != net ] || { node_net "$1"; wrap=(ip netns exec "$(netns "$1")" "${wrap[@]}"); }
  "${wrap[@]}" "$SLURMD" -N "$1" -f "$SLURM_CONF" 2>>"$DIR/log/slurmd.$1.err" \
     || die "slurmd $1 did not start (see $DIR/log/slurmd.$1.err and slurmd.$1.log)"
}
nodes_ready() { [ "$(sinfo -h -N -p main -o %t | grep -cE '^(idle|mix|alloc|comp|resv)$')" -eq "$NODES" ]; }
all_alive() {
  [ "$AUTH" = munge ] && { alive "$DIR/run/munged.pid" munged || return 1; }
  [ "$ACCT" = dbd ] && { alive "$DIR/run/mariadbd.pid" mariadbd && alive "$DIR/run/slurmdbd.pid" slurmdbd || return 1; }
  alive "$DIR/run/slurmctld.pid" slurmctld || return 1
  local i; for i in $(seq "$NODES"); do alive "$DIR/run/slurmd.n$i.pid" slurmd || return 1; done
}

case $CMD in
  up)
    # an automatic port base stays what it was
    [ "$PORT" != auto ] || [ ! -f "$DIR/settings" ] || PORT=$(sed -n 's/^PORT=//p' "$DIR/settings")
    [ -f "$DIR/run/slurmctld.pid" ] && [ -f "$DIR/settings" ] && (
      # same settings and all alive -> nothing to do
      old=$(cat "$DIR/settings"); new=$(for v in NODES CPUS MEM GPUS ACCT AUTH PORT PROCTRACK EXTRA ISOLATE GPUPREFIX; do printf '%s=%q\n' $v "${!v}"; done)
      setup_paths; [ "$old" = "$new" ] && all_alive ) && { say "already up in $DIR"; cat "$DIR/env.sh"; exit 0; }
    [ -f "$DIR/settings" ] && "$0" down --dir "$DIR" 2>/dev/null || true
    setup_paths
    choose_ports
    write_conf
    [ "$ISOLATE" != net ] || { bridge_up eth; bridge_up ib; }
    start_munge; start_db; start_ctld
    for i in $(seq "$NODES"); do start_node "n$i"; done
    wait_for 30 "nodes idle" nodes_ready || { sinfo -N -l; die "nodes are not ready; see $DIR/log"; }
    say "up in $DIR: $(sinfo -h -p main -o '%D nodes %C cpus(A/I/O/T) %G')"
    cat "$DIR/env.sh";;
  down)
    setup_paths
    if alive "$DIR/run/slurmctld.pid" slurmctld; then
      scancel -Q -u "$(id -un)" 2>/dev/null || true
      wait_for 8 "jobs end" sh -c 'test -z "$(squeue -h -t R,CG,CF,S -o %i)"' || true
    fi
    for f in "$DIR"/run/slurmd.*.pid; do [ -e "$f" ] && stop_pid "$f" slurmd; done
    stop_pid "$DIR/run/slurmctld.pid" slurmctld
    if [ "$PROCTRACK" = cgroup ]; then     # slurmd leaves its (empty) cgroups behind
      for i in $(seq "$NODES"); do find /sys/fs/cgroup/*/slurm_n"$i" -depth -type d -exec rmdir {} + 2>/dev/null || true; done
    fi
    stop_pid "$DIR/run/slurmdbd.pid" slurmdbd
    stop_pid "$DIR/run/mariadbd.pid" mariadbd
    stop_pid "$DIR/run/munged.pid" munged
    nets_down
    say "down";;
  clean) "$0" down --dir "$DIR"; rm -rf "$DIR";;
  status)
    setup_paths; rc=0
    for f in munged:munged mariadbd:mariadbd slurmdbd:slurmdbd slurmctld:slurmctld; do
      n=${f%%:*}; [ "$n" = munged ] && [ "$AUTH" != munge ] && continue
      case $n in mariadbd|slurmdbd) [ "$ACCT" = dbd ] || continue;; esac
      if alive "$DIR/run/$n.pid" "${f##*:}"; then echo "$n: up (pid $(cat "$DIR/run/$n.pid"))"; else echo "$n: DOWN"; rc=1; fi
    done
    for i in $(seq "$NODES"); do
      if alive "$DIR/run/slurmd.n$i.pid" slurmd; then echo "slurmd n$i: up (pid $(cat "$DIR/run/slurmd.n$i.pid"))"; else echo "slurmd n$i: DOWN"; rc=1; fi
    done
    timeout 10 sinfo -N -p main -o '%N %t %C %m %G %E' || rc=1
    exit $rc;;
  env) cat "$DIR/env.sh";;
  node-kill) setup_paths; kill -9 "$(cat "$DIR/run/slurmd.$ARG.pid")";;
  node-crash)
    setup_paths; p=$(cat "$DIR/run/slurmd.$ARG.pid"); ns=$(readlink "/proc/$p/ns/uts" || true)
    kill -9 "$p" 2>/dev/null || true
    # with --isolate uts|shm the node's UTS namespace marks its processes; else the environment of the tasks does
    [ "$ns" = "$(readlink /proc/self/ns/uts)" ] && ns=""
    for d in /proc/[0-9]*; do
      q=${d#/proc/}; [ "$q" = $$ ] && continue
      if [ -n "$ns" ]; then [ "$(readlink "$d/ns/uts" 2>/dev/null)" = "$ns" ] || continue
      else
        { tr '\0' '\n' < "$d/environ"; } 2>/dev/null | grep -qxF "SLURMD_NODENAME=$ARG" || continue
        tr '\0' '\n' < "$d/environ" 2>/dev/null | grep -qxF "SLURM_CONF=$SLURM_CONF" || continue
      fi
      kill -9 "$q" 2>/dev/null || true
    done;;
  node-start) setup_paths; start_node "$ARG";;
  ctld-kill) setup_paths; kill -9 "$(cat "$DIR/run/slurmctld.pid")";;
  ctld-start) setup_paths; start_ctld;;
  *) sed -n '2,40p' "$0"; exit 2;;
esac
