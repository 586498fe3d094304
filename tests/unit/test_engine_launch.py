"""Arguments of an engine, words of its log, pools of engines; nothing is started here."""

import json
import os
import socket
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from roles.role_fakes import config

from relax_hpc.config.engines import EnginePool
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import ConfigError
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.process import EngineProcess
from relax_hpc.inference.sglang import launch
from relax_hpc.inference.sglang.launch import size_of
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import host
from relax_hpc.roles.engine.host import EngineSlot, args_on_own_gpus
from relax_hpc.runtime.comm.address import hold_port
from relax_hpc.runtime.comm.orders import LOADER, Order


def test_a_held_port_is_free_for_its_server_and_found_by_nobody_else():
    with hold_port("127.0.0.1") as port:
        socket.create_server(("127.0.0.1", port)).close()  # with SO_REUSEADDR, as uvicorn does
        found = set()
        for _ in range(2000):
            with hold_port("127.0.0.1") as other:
                found.add(other)
        assert port not in found
        with socket.socket() as careless, pytest.raises(OSError, match="in use"):
            careless.bind(("127.0.0.1", port))


def test_an_engine_takes_as_many_gpus_as_its_ranks_by_whichever_name_they_are_given():
    assert size_of({}).gpus == 1
    assert size_of({"tensor_parallel_size": 4, "ep_size": 4}).gpus == 4
    assert size_of({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}).gpus == 4
    with pytest.raises(ConfigError, match=r"tp_size = 'two'"):
        size_of({"tp_size": "two"})


def test_an_engine_that_is_sent_8_bits_is_told_so_and_reads_no_weights(tmp_path):
    config = WeightsConfig(quantize="fp8", advanced={"modules_to_not_convert": ["lm_head"]})
    spec = EngineSpec("sglang", tmp_path, quantization=config.quantization_config)
    argv = launch.arguments(spec, host="h", port=1, device="cuda")
    assert argv[argv.index("--load-format") + 1] == "dummy"
    said = json.loads(argv[argv.index("--json-model-override-args") + 1])["quantization_config"]
    assert said == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "visual", "audio_tower"],
    }  # fmt: skip


def test_the_command_line_of_an_engine_is_the_one_written_down(tmp_path):
    args = {"tp_size": 2, "disable_radix_cache": True}
    spec = EngineSpec("sglang", tmp_path, "bfloat16", args, seed=3, max_running_requests=8)
    argv = launch.arguments(spec, host="10.0.0.1", port=7, device="cuda")
    assert argv == [
        "--skip-tokenizer-init", "--grammar-backend", "none", "--incremental-streaming-output",
        "--uvicorn-access-log-exclude-prefixes", "/model_info", "/v1/loads", "/health",
        "--tp-size", "2", "--disable-radix-cache", "--custom-weight-loader", LOADER,
        "--model-path", str(tmp_path), "--host", "10.0.0.1", "--port", "7", "--dtype", "bfloat16",
        "--random-seed", "3", "--weight-version", "0", "--max-running-requests", "8",
    ]  # fmt: skip


def test_an_engine_on_a_cpu_starts_although_others_take_memory_meanwhile(tmp_path):
    spec = EngineSpec("sglang", tmp_path)
    argv = launch.arguments(spec, host="h", port=1, device="cpu")
    # SGLang holds what is free after loading against 1 - this of what was free before.
    assert argv[argv.index("--mem-fraction-static") + 1] == "0.5"
    assert argv[argv.index("--max-total-tokens") + 1] == "32768"


def test_the_token_of_an_engine_is_in_its_file_of_options(tmp_path):
    launch.write_options(tmp_path / "options", "secret")
    assert json.loads((tmp_path / "options").read_text()) == {"api-key": "secret"}


def client_of(code_of):
    """A client of a server that answers with these codes, and what it is asked."""
    asked = []

    def serve(request):
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(code_of(request.url.path), json={"success": True})

    client = EngineClient("http://engine", "t")
    transport = httpx.MockTransport(serve)
    client._http._http = httpx.Client(base_url="http://engine", transport=transport)
    return client, asked


def test_a_version_is_named_with_the_bucket_that_completes_it():
    client, asked = client_of(lambda _: 200)
    for name, last in (("a", False), ("b", True)):
        client.update_weights([name], ["bfloat16"], [(2, 3)], group="g", version=7, last=last)
    target = {"selector": "target", "disable_draft_model": True}
    bucket = {"dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g",
              "load_format": "flattened_bucket", "flush_cache": False, **target}  # fmt: skip
    assert asked == [
        ("/begin_weight_update", target),
        ("/update_weights_from_distributed", bucket | {"names": ["a"]}),
        ("/update_weights_from_distributed", bucket | {"names": ["b"], "weight_version": "7"}),
        ("/end_weight_update", {}),
    ]


def test_a_server_without_sessions_is_asked_for_one_once():
    order = Order("s", "g", "receive", 1.0)
    client, asked = client_of(lambda path: 404 if "begin" in path else 200)
    for version in (1, 2):
        client.receive_weights([order], version=version)
    update = "/update_weights_from_tensor"
    assert [path for path, _ in asked] == ["/begin_weight_update", update, update]
    assert [body.get("weight_version") for _, body in asked[1:]] == ["1", "2"]


def test_whoever_is_given_weights_leaves_its_draft_model_alone_and_an_open_session_is_closed():
    """The first begin is refused: a sender that died has left its session open."""
    answers = iter([400, 200, 200, 200, 200])
    client, asked = client_of(lambda _: next(answers))
    client.receive_weights([Order("s", "g", "receive", 1.0)], version=1)
    begin, update, end = (
        "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
    )  # fmt: skip
    assert [path for path, _ in asked] == [begin, end, begin, update, end]
    told = [body for path, body in asked if path != end]
    assert all(body["selector"] == "target" and body["disable_draft_model"] for body in told)


@pytest.mark.parametrize(("nodes", "first"), [(1, [0, 4, 8, 12]), (2, [0, 2, 4, 6])])
def test_engines_of_one_node_take_its_gpus_one_after_the_other(nodes, first):
    pool = EnginePool(
        kind="sglang", nodes_per_engine=nodes, args={"tp_size": 4},
        resources={"nodes": nodes, "gpus_per_node": 16},
    )  # fmt: skip
    slots = [EngineSlot("rollout-0", 0, local_index) for local_index in range(4)]
    taken = [args_on_own_gpus(pool, slot)["base_gpu_id"] for slot in slots]
    assert taken == first


def test_an_engine_that_died_of_another_rank_that_had_no_memory_is_told_of_it(tmp_path):
    """As 0.5.17 over two ranks says it: the last exception is not the cause."""
    (tmp_path / "log").write_text(
        "RuntimeError: of the start before\n"
        "[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp\n"
        "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:27288\n"
        "frame #0: c10::Error::Error\n"
    )
    process = SimpleNamespace(pid=os.getpid())
    engine = EngineProcess(process, None, "", tmp_path / "log", said_before=34)
    lost = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:27288"
    assert engine.cause() == lost
    args = {"mem_fraction_static": 0.85}
    engine.remedy_for = partial(launch.remedy, engine_args=args, pool="engines.a")
    assert engine.cause().startswith(
        f"{lost}: out of memory: lower engines.a.args.mem_fraction_static (0.85), "
    )
    (tmp_path / "log").write_text("x" * 40)
    assert engine.cause() == ""


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"engines__rollout__model": "m"}, "engines.rollout.model = 'm': its weights follow"),
        ({"engines__judge__placement": "actor"}, "engines.judge.placement = 'actor': only the po"),
        ({"engines__judge__resources__max_nodes": 2}, "engines.judge.resources.max_nodes = 2: eng"),
        ({"engines__judge__count": 3, "engines__judge__engines_per_task": 2}, "engines.judge.engi"),
    ],
)
def test_what_a_pool_cannot_be_is_refused_by_its_name(settings, answer):
    with pytest.raises(ConfigError) as refused:
        config(**settings)
    assert answer in str(refused.value)


def test_engines_of_a_fixed_pool_are_started_with_what_is_theirs_and_not_the_policys():
    settings = config(
        model__path="policy", seed=7, weights__quantize="fp8",
        weights__advanced__kv_cache="recompute",
        engines__rollout__kind="sglang", engines__judge__kind="sglang",
        engines__judge__model="judge", engines__judge__args={"tp_size": 2},
        engines__judge__resources__gpus_per_node=4, engines__judge__count=2,
        engines__judge__max_running_requests=5,
    )  # fmt: skip
    context = TaskContext("judge", 1, 2, 1, attempt="7.0", start=1, node="n")
    [slot] = host.slots_of(settings.engines["judge"], context)
    made = host.hosting_of(settings, slot, "judge")
    spec = made.spec
    assert (slot.id, str(spec.model_path), spec.pool, spec.seed) == ("judge-1", "judge", "judge", 8)
    assert spec.args == {"tp_size": 2, "base_gpu_id": 2} and spec.max_running_requests == 5
    assert spec.quantization is None and not made.recomputes
    rollout = host.hosting_of(settings, slot)
    assert str(rollout.spec.model_path) == "policy" and rollout.spec.quantization
    assert rollout.recomputes
