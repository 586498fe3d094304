"""Weights for an SGLang that samples with a draft model; its scheduler alone is real here."""

import json
import subprocess

import httpx
import pytest
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.inference.client import EngineClient
from relax_hpc.runtime.comm.orders import Order

pytestmark = pytest.mark.sglang

# Reads (endpoint, body) as its server does, and tells whose weights its scheduler then touches.
SCHEDULER = """\
import json, sys
import torch
from pydantic import TypeAdapter
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

class Worker:
    def __init__(self, role):
        self.role, self.weight_updater = role, self
    def weight_update_runners(self):
        return [(self.role, self)]
    def deserialize_own_rank(self, tensors):
        return tensors
    def update_weights_from_tensor(self, *_, **__):
        touched.append(self.role)
        return True, ""
    begin_weight_update = end_weight_update = update_weights_from_tensor

class Scheduler:
    def record_weight_version_change(self, new_version):
        pass

touched, manager = [], object.__new__(SchedulerWeightUpdaterManager)
settings = {
    "tp_worker": Worker("target"), "draft_worker": Worker("draft"), "scheduler": Scheduler(),
    "metrics_collector": None, "tp_cpu_group": None, "_session": None,
}
for name, value in settings.items():
    if name in SchedulerWeightUpdaterManager.__slots__:
        setattr(manager, name, value)
torch.distributed.barrier = lambda group: None
for endpoint, body in json.loads(sys.argv[1]):
    parts = [part.capitalize() for part in endpoint[1:].split("_")]
    if request := getattr(io_struct, "".join(parts) + "ReqInput", None):
        request = TypeAdapter(request).validate_python(body)
        assert getattr(manager, endpoint[1:])(request).success, endpoint
print(json.dumps(touched))
"""


def test_an_update_is_for_the_model_that_is_trained_and_leaves_a_draft_model_alone():
    asked = []

    def serve(request):
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={"success": True})

    client = EngineClient("http://engine", "t")
    transport = httpx.MockTransport(serve)
    client._http._http = httpx.Client(base_url="http://engine", transport=transport)
    client.receive_weights([Order("s", "g", "receive", 1.0)], version=1)
    command = [SGLANG_PYTHON, "-c", SCHEDULER, json.dumps(asked)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert set(json.loads(said.stdout.splitlines()[-1])) == {"target"}
