"""`python -m relax_hpc`: the command line where the console script is not on PATH."""

from relax_hpc.cli.main import main

if __name__ == "__main__":
    main()
