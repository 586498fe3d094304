#!/usr/bin/env bash
# install_packages.sh - what the tests need of the distribution: Slurm, munge and Open MPI for a local
# cluster; for the bus, kernels in user mode (an NFS server and its hosts), btrfs (quotas), a compiler
# (an injector of errors) and strace; for programs of a model, bubblewrap. Installs only what is
# missing; where it may not, it says so and the tests that need it are skipped.
set -euo pipefail
missing=()
need() { # need COMMAND-OR-FILE PACKAGE...
  command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || [ -e "$1" ] || missing+=("${@:2}")
}
need slurmctld munge slurmctld slurmd slurm-client
need slurmdbd slurmdbd
need mariadbd mariadb-server-core
need mariadb-admin mariadb-client
need mpirun openmpi-bin libopenmpi-dev
# The mpi/pmix plugin of Slurm loads the unversioned library, which only the -dev package has.
need "/usr/lib/$(uname -m)-linux-gnu/pmix2/lib/libpmix.so" libpmix-dev
need linux.uml user-mode-linux
need ip iproute2
need mkfs.btrfs btrfs-progs
need gcc gcc
need /usr/include/stdio.h libc6-dev
need strace strace
need bwrap bubblewrap
[ "${#missing[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "install_packages: cannot install ${missing[*]} here; tests that need it will be skipped" >&2
  exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
