"""Arguments of an engine at its start, and the words of its log; nothing is started here."""

import json
import os
import re
import socket
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from relax_hpc.comm.orders import LOADER, Order
from relax_hpc.config import engines as pools
from relax_hpc.config.engines import EnginePool
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.engines.child import EngineProcess
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.ports import held_port
from relax_hpc.engines.sglang import diagnosis, launch
from relax_hpc.engines.sglang.launch import Share, size_of
from relax_hpc.errors import ConfigError
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.hosting import Slot, args_on_own_gpus, slots_of

# The lines of a start of SGLang 0.5.17 on a GPU that tell how far it is.
LOG = [
    ("/site/sglang/launch_server.py:56: UserWarning: 'python -m ...", "importing"),
    ("[15:25:47] server_args=ServerArgs(model_path='m', port=1)", "starting its workers"),
    ("[15:26:13] Init torch distributed begin.", "joining its ranks"),
    ("[15:26:18] Load weight begin. avail mem=139.09 GB", "loading weights"),
    ("[15:26:18] Load weight end. elapsed=0.39 s", "allocating the key-value cache"),
    ("[15:26:18] Capture target decode CUDA graph begin. bs=[1]", "capturing graphs"),
    ("[15:26:54] max_total_num_tokens=769870", "starting its HTTP server"),
    ("[15:26:54] INFO:     Uvicorn running on http://127.0.0.1:1", "warming up"),
]


def listen(host, port):
    with socket.create_server((host, port)):
        return True


def test_a_held_port_is_free_for_its_server_and_found_by_nobody_else():
    with held_port("127.0.0.1") as port:
        assert listen("127.0.0.1", port)  # create_server sets SO_REUSEADDR, as uvicorn does
        found = set()
        for _ in range(2000):
            with held_port("127.0.0.1") as other:
                found.add(other)
        assert port not in found
        with socket.socket() as careless, pytest.raises(OSError, match="in use"):
            careless.bind(("127.0.0.1", port))


def test_keys_are_recomputed_only_where_no_prefix_of_an_old_policy_can_be_found():
    old = {"flushes_paused": False, "version": "0.5.17"}
    launch.check_recompute({"disable_radix_cache": True}, **old)
    launch.check_recompute({}, flushes_paused=True, version="0.5.23")
    with pytest.raises(ConfigError, match=r"0\.5\.17 .*disable_radix_cache = true"):
        launch.check_recompute({}, **old)


def test_every_line_of_a_start_moves_its_phase_on():
    said = ""
    assert diagnosis.phase(said) == "importing"
    for line, phase in LOG:
        said += f"{line}\n"
        assert diagnosis.phase(said) == phase


@pytest.mark.parametrize(
    ("said", "helps"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            r"lower engines\.rollout\.args\.mem_fraction_static \(0\.9\)",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            r"raise engines\.rollout\.args\.mem_fraction_static \(0\.9\)",
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-"
            "static=0.9. Raise --mem-fraction-static above 0.976.",
            r"raise engines\.rollout\.args\.mem_fraction_static \(0\.9\)",
        ),
        ("    assert self.total_num_heads % attn_tp_size == 0", r"tp_size \(3\): use a divisor"),
        ("RuntimeError: CUDA error: invalid device ordinal", r"resources\.gpus_per_node"),
        ("ModuleNotFoundError: No module named 'sglang'", "without SGLang"),
        (
            "/bin/python: Error while finding module specification for 'relax_hpc.engines.sglang."
            "serve' (ModuleNotFoundError: No module named 'relax_hpc')",
            "without this package",
        ),
        ("[Errno 98] error while attempting to bind: address already in use", "port was taken"),
        ("KeyError: 'unheard of'", "^$"),
    ],
)
def test_a_known_cause_is_answered_with_what_to_change(said, helps):
    args = {"mem_fraction_static": 0.9, "tp_size": 3}
    assert re.search(helps, diagnosis.remedy(f"much\n{said}\nmore", args))


def test_an_engine_takes_as_many_gpus_as_its_ranks_by_whichever_name_they_are_given():
    assert size_of({}).gpus == 1
    assert size_of({"tensor_parallel_size": 4, "ep_size": 4}).gpus == 4
    assert size_of({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}).gpus == 4
    with pytest.raises(ConfigError, match=r"tp_size = 'two'"):
        size_of({"tp_size": "two"})


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        ({"dp_size": 2}, r"dp_size = 2: .*raise engines\.rollout\.count"),
        ({"pipeline_parallel_size": 2}, r"pp_size = 2: .*raise tp_size"),
        ({"nnodes": 2}, r"nnodes: is set by the run; set engines\.rollout\.nodes_per_engine"),
        ({"model": "x"}, r"model: is set by the run; set model\.path"),
        ({"dist_init_addr": "h:1"}, r"dist_init_addr: is set by the run; leave it out"),
    ],
)
def test_what_an_engine_here_cannot_do_is_refused_by_key(args, answer):
    with pytest.raises(ConfigError, match=rf"engines\.rollout\.args\.{answer}"):
        launch.check(args)


def test_a_part_of_an_engine_is_told_its_rank_and_where_to_meet(tmp_path):
    def argv(share):
        return launch.arguments(
            tmp_path, host="h", port=1, device="cuda", dtype="bfloat16", seed=0,
            max_running_requests=8, engine_args={"tp_size": 16}, share=share,
        )  # fmt: skip

    text = " ".join(argv(Share(2, 1, "10.0.0.1:777")))
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:777" in text
    assert "nnodes" not in " ".join(argv(launch.ALONE))


def test_an_engine_that_is_sent_8_bits_is_told_so_and_reads_no_weights(tmp_path):
    config = WeightsConfig(quantize="fp8", modules_to_not_convert=["lm_head"])
    argv = launch.arguments(
        tmp_path, host="h", port=1, device="cuda", dtype="bfloat16", seed=0,
        max_running_requests=8, engine_args={}, quantization=config.quantization_config,
    )  # fmt: skip
    assert argv[argv.index("--load-format") + 1] == "dummy"
    said = json.loads(argv[argv.index("--json-model-override-args") + 1])["quantization_config"]
    assert said == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "visual", "audio_tower"],
    }  # fmt: skip
    assert WeightsConfig().quantization_config is None


def test_the_command_line_of_an_engine_is_the_one_written_down(tmp_path):
    argv = launch.arguments(
        tmp_path, host="10.0.0.1", port=7, device="cuda", dtype="bfloat16", seed=3,
        max_running_requests=8, engine_args={"tp_size": 2, "disable_radix_cache": True},
    )  # fmt: skip
    assert argv == [
        "--skip-tokenizer-init", "--grammar-backend", "none", "--incremental-streaming-output",
        "--uvicorn-access-log-exclude-prefixes", "/model_info", "/v1/loads", "/health",
        "--tp-size", "2", "--disable-radix-cache", "--custom-weight-loader", LOADER,
        "--model-path", str(tmp_path), "--host", "10.0.0.1", "--port", "7", "--dtype", "bfloat16",
        "--random-seed", "3", "--weight-version", "0", "--max-running-requests", "8",
    ]  # fmt: skip


def test_an_engine_on_a_cpu_starts_although_others_take_memory_meanwhile(tmp_path):
    argv = launch.arguments(
        tmp_path, host="h", port=1, device="cpu", dtype="float32", seed=0,
        max_running_requests=8, engine_args={},
    )  # fmt: skip
    # SGLang holds what is free after loading against 1 - this of what was free before.
    assert argv[argv.index("--mem-fraction-static") + 1] == "0.5"
    assert argv[argv.index("--max-total-tokens") + 1] == "32768"


def test_the_token_of_an_engine_is_in_its_file_of_options(tmp_path):
    launch.write_options(tmp_path / "options", "secret")
    assert json.loads((tmp_path / "options").read_text()) == {"api-key": "secret"}


def client_of(answer):
    """A client of a server that answers so, and what it is asked."""
    asked = []

    def serve(request):
        asked.append((request.url.path, json.loads(request.content)))
        return answer(request.url.path)

    client = EngineClient("http://engine", "t")
    transport = httpx.MockTransport(serve)
    client._http._http = httpx.Client(base_url="http://engine", transport=transport)
    return client, asked


def test_a_version_is_named_with_the_bucket_that_completes_it():
    client, asked = client_of(lambda path: httpx.Response(200, json={"success": True}))
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
    client, asked = client_of(
        lambda path: httpx.Response(404 if "begin" in path else 200, json={"success": True})
    )
    for version in (1, 2):
        client.receive_weights([order], version=version)
    update = "/update_weights_from_tensor"
    assert [path for path, _ in asked] == ["/begin_weight_update", update, update]
    assert [body.get("weight_version") for _, body in asked[1:]] == ["1", "2"]


@pytest.mark.parametrize(("replies", "asks"), [([200] * 3, 2), ([400, 200, 200, 200, 200], 3)])
def test_whoever_is_given_weights_is_told_to_leave_its_draft_model_alone(replies, asks):
    answers = iter(replies)
    client, asked = client_of(lambda path: httpx.Response(next(answers), json={"success": True}))
    client.receive_weights([Order("s", "g", "receive", 1.0)], version=1)
    told = [body for path, body in asked if not path.startswith("/end")]
    assert len(told) == asks
    assert all(body["selector"] == "target" and body["disable_draft_model"] for body in told)


def test_a_session_that_a_dead_sender_left_open_is_closed_first():
    replies = iter([400, 200, 200, 200, 200])
    client, asked = client_of(lambda path: httpx.Response(next(replies), json={"success": True}))
    client.receive_weights([Order("s", "g", "receive", 1.0)], version=1)
    begin, end = "/begin_weight_update", "/end_weight_update"
    paths = [path for path, _ in asked]
    assert paths == [begin, end, begin, "/update_weights_from_tensor", end]


def context(rank, local_rank):
    return TaskContext("rollout", rank, 4, local_rank, attempt="1.0", start=1, node="n")


def test_neighbouring_tasks_share_an_engine_that_spans_nodes():
    spread = EnginePool(kind="sglang", count=2, nodes_per_engine=2, resources={"nodes": 4})
    slots = [slots_of(spread, context(rank, 0))[0] for rank in range(4)]
    assert [(slot.id, slot.number, slot.part) for slot in slots] == [
        ("rollout-0", 0, 0),
        ("rollout-0", 0, 1),
        ("rollout-1", 1, 0),
        ("rollout-1", 1, 1),
    ]


def test_a_task_with_several_engines_has_a_seat_for_each_and_gpus_in_their_order():
    """2 nodes of 8 GPUs, a task on each, 4 engines of 2 GPUs in it."""
    pool = EnginePool(
        kind="sglang", count=8, engines_per_task=4, args={"tp_size": 2},
        resources={"nodes": 2, "gpus_per_node": 8},
    )  # fmt: skip
    assert (pool.num_tasks, pool.num_hosts) == (2, 2)
    slots = [slot for rank in range(2) for slot in slots_of(pool, context(rank, 0))]
    names = [f"rollout-{task}.{index}" for task in range(2) for index in range(4)]
    assert [slot.id for slot in slots] == names
    assert [slot.number for slot in slots] == list(range(8))
    taken = [args_on_own_gpus(pool, slot)["base_gpu_id"] for slot in slots]
    assert taken == [0, 2, 4, 6] * 2


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"count": 3}, "does not divide engines.rollout.count = 3"),
        (
            {"kind": "sglang", "nodes_per_engine": 2, "resources": {"nodes": 2}},
            r"over 2 nodes .* use 1",
        ),
    ],
)
def test_engines_share_a_task_only_where_they_can(settings, answer):
    settings = {"count": 2, "engines_per_task": 2, **settings}
    with pytest.raises(ValueError, match=answer):
        pools.check("rollout", EnginePool.model_validate(settings))


@pytest.mark.parametrize(("nodes", "first"), [(1, [0, 4, 8, 12]), (2, [0, 2, 4, 6])])
def test_engines_of_one_node_take_its_gpus_one_after_the_other(nodes, first):
    pool = EnginePool(
        kind="sglang", nodes_per_engine=nodes, args={"tp_size": 4},
        resources={"nodes": nodes, "gpus_per_node": 16},
    )  # fmt: skip
    slots = [Slot("rollout-0", 0, local_index) for local_index in range(4)]
    taken = [args_on_own_gpus(pool, slot)["base_gpu_id"] for slot in slots]
    assert taken == first


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"kind": "embedded", "resources": {"nodes": 2}}, "use engines.rollout.kind = 'sglang'"),
        ({"kind": "sglang"}, "1 engines take 2 nodes of their own"),
    ],
)
def test_an_engine_spans_nodes_only_where_it_can(settings, answer):
    with pytest.raises(ValueError, match=answer):
        pools.check("rollout", EnginePool.model_validate({"nodes_per_engine": 2, **settings}))


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
    engine.remedy_for = partial(diagnosis.remedy, engine_args=args, pool="engines.a")
    assert engine.cause().startswith(
        f"{lost}: out of memory: lower engines.a.args.mem_fraction_static (0.85), "
    )
    (tmp_path / "log").write_text("x" * 40)
    assert engine.cause() == ""
