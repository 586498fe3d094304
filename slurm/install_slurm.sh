#!/usr/bin/env bash
# install_slurm.sh - Slurm, munge and Open MPI from the distribution, for the tests' local cluster.
# Installs only what is missing; where it may not, it says so and the tests that need it are skipped.
set -euo pipefail
missing=()
need() { # need COMMAND-OR-FILE PACKAGE...
  command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || [ -e "$1" ] || missing+=("${@:2}")
}
need slurmctld munge slurmctld slurmd slurm-client
need mpirun openmpi-bin libopenmpi-dev
# The mpi/pmix plugin of Slurm loads the unversioned library, which only the -dev package has.
need "/usr/lib/$(uname -m)-linux-gnu/pmix2/lib/libpmix.so" libpmix-dev
[ "${#missing[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "install_slurm: cannot install ${missing[*]} here; tests on a real Slurm will be skipped" >&2
  exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
