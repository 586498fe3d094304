"""Invites engines by records in the run directory, which the engines' tasks poll."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from relax_hpc.errors import EngineError
from relax_hpc.inference.members import Engines, Member
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.meeting.invitation import CarrierName, Invitation, Joins

_POLL_S = 0.1


class FilesCarrier:
    way: CarrierName = "files"
    problem = ""

    def __init__(self, paths: RunPaths, threads: ThreadPoolExecutor, timeout_s: float) -> None:
        self._paths, self._threads, self._timeout_s = paths, threads, timeout_s

    def reaches(self, engines: Engines, timeout_s: float) -> list[Member]:
        return [member for member in engines if member.task]

    def invite(self, engines: Engines, invitations: Mapping[Member, Invitation]) -> Joins:
        asked = [invitation.to_json() for invitation in invitations.values()]
        write_json(self._paths.rendezvous("weights-files"), {"invitations": asked})
        return {
            member: self._threads.submit(self._wait, invitation)
            for member, invitation in invitations.items()
        }

    def close(self) -> None: ...

    def _wait(self, asked: Invitation) -> None:
        deadline, path = time.monotonic() + self._timeout_s, self._paths.joined(asked.id)
        while time.monotonic() < deadline:
            answer = read_json(path)
            if answer is not None and answer["group"] == asked.group:
                if answer["error"]:
                    raise EngineError(answer["error"])
                return
            time.sleep(_POLL_S)
        raise EngineError(f"did not answer an invitation within {self._timeout_s:.0f} s")
