"""Brings the trainer and its engines into one weight group, before anything is sent.

    invitation   what rank 0 of the trainer says to whom, and what comes back
    mpi          over MPI, to the task that owns the engine; that has it join on its own node
    files        likewise, by records in the run directory
    http         from rank 0 straight to the engine
    attendant    in the engine's task: hears invitations of the first two kinds

Whatever carries it, an invitation is the same, and engines join by SGLang's stock endpoint.
"""
