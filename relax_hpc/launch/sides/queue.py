"""The other job in Slurm's queue."""

import logging
import re

from relax_hpc.launch import states
from relax_hpc.launch.jobs import is_silent, output_of, words_of
from relax_hpc.launch.sides.turn import Queued, Seen

log = logging.getLogger(__name__)

_ENDING = "COMPLETING"
"""A job that was requeued to be held is held from then on; a release is heeded while its last tasks
end, too. One that was suspended has no priority either."""


def look(job_id: str) -> Seen:
    """Asks Slurm for a job, by the id of its leader."""
    answer = output_of(["scontrol", "--oneliner", "show", "job", job_id])
    if answer.returncode:
        gone = not is_silent(answer) and "Invalid job id" in answer.stderr
        return Seen("ended" if gone else "unknown")
    return parse(job_id, answer.stdout)


def parse(job_id: str, text: str) -> Seen:
    """Reads what `scontrol --oneliner show job` says; the leader stands in the first line."""
    found = dict(re.findall(r"(\w+)=(\S*)", text.partition("\n")[0]))
    state = found.get("JobState", states.UNKNOWN)
    queued: Queued = "active"
    if state == states.UNKNOWN:
        queued = "unknown"
    elif not states.is_alive(state):
        queued = "ended"
    elif (states.is_waiting(state) or state == _ENDING) and found.get("Priority") == "0":
        queued = "held"
    return Seen(queued, f"{job_id}.{found.get('Restarts', '0')}")


def release(job_id: str) -> bool:
    """Lets Slurm start a job that is held; one that is not is left as it is."""
    answer = output_of(["scontrol", "release", job_id])
    if answer.returncode:
        log.warning("job %s could not be released (%s)", job_id, words_of(answer))
    return not answer.returncode
