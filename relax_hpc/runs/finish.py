"""Last line of the job script: `python -m relax_hpc.runs.finish RUN_DIR` writes the summary."""

import argparse
from pathlib import Path

from relax_hpc import permissions


def main() -> None:
    from relax_hpc.runs import summary

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    permissions.adopt(run_dir)
    summary.write(run_dir)


if __name__ == "__main__":
    main()
