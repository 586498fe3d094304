"""TensorBoard of a run by TensorBoard's own reader: while it is written, after restarts, whole."""

import json
import threading

import pytest
from board_runs import curves, evaluation, event, make, read, step, texts, write
from file_systems import full, small_tmpfs

from relax_hpc.runs.boards import finish, run_board
from relax_hpc.runs.boards.run_board import RunBoard
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.telemetry import events
from relax_hpc.runtime.telemetry.events import EventTail
from relax_hpc.runtime.telemetry.history import Point
from relax_hpc.runtime.telemetry.tensorboard import TensorBoard


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes seconds, and is tested elsewhere."""
    monkeypatch.setattr(run_board.curve, "plot", lambda *_: None)


@pytest.fixture
def run(tmp_path):
    return make(tmp_path, engines={"rollout": {"count": 2}})


def test_a_reader_that_follows_has_every_point_once_as_it_comes(run):
    paths, config = run
    board = RunBoard(paths, config)
    board.update()
    assert not paths.tensorboard.exists(), "nothing is there to be shown"
    first = evaluation(0, 1.0, 1.0, number=0, when="before", tasks=2)
    write(paths, step(1, 2.0, 0.25, loss=-0.5), first)
    board.update()
    view = read(paths.tensorboard)
    assert curves(view) == {"reward/mean": [(1, 0.25)], "loss/total": [(1, -0.5)]}
    write(
        paths,
        first | {"correct": 3.0, "time": 2.5, "rank": 1},  # now both have told their share
        step(2, 3.0, 0.5, loss=-0.25, note="text", good=True),
        event("checkpoint", 3.5, step=2, wait_s=0.5, background_s=4.0, bytes=7),
    )
    board.update()
    view.Reload()
    assert curves(view) == {
        "reward/mean": [(1, 0.25), (2, 0.5)],
        "loss/total": [(1, -0.5), (2, -0.25)],
        "eval/heldout/reward": [(0, 0.5)],
        "time/checkpoint/wait": [(2, 0.5)],
        "time/checkpoint/background": [(2, 4.0)],
    }
    assert view.Scalars("loss/total")[1].wall_time == 3.0


def test_steps_after_the_checkpoint_replace_those_that_were_lost(run):
    paths, config = run
    board = RunBoard(paths, config)
    write(
        paths,
        *(step(number, float(number), number / 8) for number in (1, 2, 3, 4)),
        evaluation(4, 1.0, 4.1, number=1), evaluation(4, 1.0, 4.2, number=1, rank=1),
        event("publish", 4.3, step=2, members=["a"], **{"sync/total": 0.5}),
        event("publish", 4.4, step=4, members=["a"], **{"sync/total": 0.5}),
    )  # fmt: skip
    board.update()
    view = read(paths.tensorboard)
    write(paths, event("resume", 5.0, rank=0, step=2), event("resume", 5.0, rank=1, step=2))
    board.update()
    assert curves(view.Reload())["reward/mean"] == [(1, 0.125), (2, 0.25)], "before others come"
    write(
        paths,
        event("publish", 5.1, step=2, members=["b"], **{"sync/total": 0.75}),  # of a newcomer
        step(3, 6.0, 0.75),
        event("publish", 6.2, step=3, members=["a"], **{"sync/total": 0.25}),
        event("publish", 6.3, step=4, members=[], **{"sync/total": 9.0}),
        event("loaded", 6.4, step=4, members=["a"], **{"sync/load": 0.125}),
    )  # fmt: skip
    board.update()
    expected = {
        "reward/mean": [(1, 0.125), (2, 0.25), (3, 0.75)],
        "eval/heldout/reward": [(4, 0.25)],
        "sync/total": [(2, 0.5), (3, 0.25)],
        "sync/load": [(4, 0.125)],
    }
    assert curves(view.Reload()) == expected, "for who was looking"
    board.end(failed=True)
    assert curves(read(paths.tensorboard)) == expected, "for who looks afterwards"


def test_what_the_critic_learned_is_drawn_once_whoever_goes_back(run):
    paths, config = run
    board = RunBoard(paths, config)
    learned = [
        event("critic_step", float(n), "critic", step=n, loss=n / 4, **{"value/explained": n / 8})
        for n in (1, 2, 3)
    ]
    write(paths, *learned[:2], step(1, 2.5, 0.5), step(2, 2.6, 0.5), learned[2])
    board.update()
    write(
        paths,
        event("resume", 5.0, rank=0, step=1), step(2, 6.0, 0.75),
        event("critic_resume", 6.0, "critic", step=0), *learned,
    )  # fmt: skip
    board.update()
    board.end(failed=False)
    assert curves(read(paths.tensorboard)) == {
        "reward/mean": [(1, 0.5), (2, 0.75)],
        "loss/critic": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "loss/critic/explained": [(1, 0.125), (2, 0.25), (3, 0.375)],
    }


def test_a_follower_of_a_later_attempt_takes_the_place_of_the_one_before(run):
    paths, config = run
    first = RunBoard(paths, config)
    write(paths, step(1, 1.0, 0.25), step(2, 2.0, 0.5))
    first.update()
    view = read(paths.tensorboard)
    write(paths, event("resume", 3.0, step=1), step(2, 4.0, 0.75))
    for _ in range(3):
        RunBoard(paths, config).update()
        for each in (view.Reload(), read(paths.tensorboard)):
            assert curves(each) == {"reward/mean": [(1, 0.25), (2, 0.75)]}
    assert len(list(paths.tensorboard.iterdir())) == 2, "a reader may still be in the one before"


def test_what_engines_and_producers_say_between_two_steps_is_one_point(run):
    paths, config = run
    engine = {"id": "rollout-0", "version": 0}
    write(
        paths,
        event("load", 1.0, "rollout", 0, seconds=5.0, num_tokens=40, in_flight=3, kv_used=0.5,
              **engine),
        event("load", 2.0, "rollout", 0, seconds=5.0, num_tokens=60, in_flight=1, kv_used=0.25,
              num_given=30, num_cached=20, num_media=0, num_media_cached=0, **engine),
        event("load", 2.0, "rollout", 1, seconds=4.0, num_tokens=8, in_flight=2, kv_used=None,
              num_given=10, num_cached=5, num_media=8, num_media_cached=2, **engine),
        event("shard", 1.0, "rollout", num_trajectories=1, **{"rollout/a": 1.0, "rollout/x": None}),
        event("shard", 1.5, "rollout", num_trajectories=3, **{"rollout/a": 0.0, "rollout/y": 2.0}),
        event("shard", 1.6, "rollout", num_trajectories=0, **{"rollout/a": None}),
        # Of 8 rows that are 4 episodes; one has a "y".
        event("shard", 1.7, "rollout", num_trajectories=8, num_episodes=4, counts={"rollout/y": 1},
              **{"rollout/a": 1.0, "rollout/y": 6.0}),
        event("reward_errors", 1.7, "rollout", num_errors=1, num_samples=3, first="it broke"),
        step(1, 3.0, 0.5, **{"reward/errors": 0.5, "parts/b": 0.75}), step(2, 4.0, 0.5),
    )  # fmt: skip
    finish.complete(paths, config, failed=False)
    assert curves(read(paths.tensorboard)) == {
        "reward/mean": [(1, 0.5), (2, 0.5)],
        "rollout/engines/rollout-0/tokens_per_s": [(1, 12.0)],  # 100 in 10 s and 8 in 4 s
        "rollout/engines/rollout-0/cached": [(1, 0.625)],  # 25 of 40
        "rollout/engines/rollout-0/media_cached": [(1, 0.25)],
        "rollout/engines/rollout-0/in_flight": [(1, 3.0)],
        "rollout/engines/rollout-0/kv_used": [(1, 0.25)],
        "reward/parts/b": [(1, 0.75)],
        "rollout/a": [(1, 0.625)],  # 1 + 0 + 4 of 1 + 3 + 4
        "rollout/y": [(1, 3.0)],  # 3 x 2 + 6 of 3 + 1
        "reward/errors": [(1, 0.5)],  # of what is trained on; held-out ones are not of the step
    }


def test_held_out_losses_are_under_their_steps(tmp_path):
    sft = {"train": "t", "batch_size": 1, "num_steps": 9}
    paths, config = make(tmp_path, sft=sft, **dict.fromkeys(("prompts", "schedule", "eval")))
    for at, loss in ((0, 4.0), (2, 3.0)):
        write(paths, event("heldout", 1.0 + at, step=at, loss=loss, num_tokens=1))
    finish.complete(paths, config, failed=False)
    assert curves(read(paths.tensorboard)) == {"eval/heldout/loss": [(0, 4.0), (2, 3.0)]}


def test_what_was_drawn_to_the_end_is_not_drawn_again_and_what_was_broken_off_is(run):
    paths, config = run
    write(paths, step(1, 1.0, 0.5))
    followed = RunBoard(paths, config)
    followed.end(failed=False)
    finish.complete(paths, config, failed=False)
    assert len(list(paths.tensorboard.iterdir())) == 1
    write(paths, step(2, 2.0, 0.5))  # after the follower was killed, say
    finish.complete(paths, config, failed=False)
    assert len(list(paths.tensorboard.iterdir())) == 2
    assert curves(read(paths.tensorboard)) == {"reward/mean": [(1, 0.5), (2, 0.5)]}


def test_responses_of_an_evaluation_can_be_read_even_those_that_are_markup(run):
    paths, config = run
    board = RunBoard(paths, config)
    write(paths, evaluation(3, 1.0, 5.0, number=1))
    board.update()
    rows = [
        {"prompt": line, "sample": 0, "score": 0.5, "finish": "stop", "num_tokens": 2,
         "texts": [f"<script>{line}</script>", "x" * 5000 * line]}
        | ({"answer": "<7>", "metadata": {"level": 1}} if line == 1 else {})
        for line in range(6)
    ]  # fmt: skip
    path = paths.eval_rows("heldout", 3, "during", 1, 0)
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    board.update()  # they are there only now
    [(at, said)] = texts(paths.tensorboard, "eval/heldout/responses")
    assert at == 3 and said.startswith("<pre>prompt 0, sample 0: score 0.5, stop, 2 tokens\n")
    assert "&lt;script&gt;3&lt;/script&gt;" in said and "<script" not in said
    assert '2 tokens\nanswer: &lt;7&gt;\nmetadata: {"level":1}\n&lt;script&gt;1' in said
    assert said.count("answer") == 1
    assert "prompt 4" not in said and "letters ...]" in said and len(said) < 10_000
    write(paths, step(1, 6.0, 0.5), step(2, 7.0, 0.5), event("resume", 8.0, step=1))
    write(paths, evaluation(3, 1.0, 9.0, number=1))  # a task that was started again repeats it
    board.update()
    assert texts(paths.tensorboard, "eval/heldout/responses") == [(at, said)]


def test_a_line_that_is_being_written_is_read_once_it_is_complete(tmp_path):
    path = tmp_path / "actor-0.jsonl"
    tail = EventTail(tmp_path)
    path.write_bytes(b'{"time": 2, "event": "a"}\nrubbish\n{"time": 1, ')
    assert [each["event"] for each in tail.read()] == ["a"]
    with path.open("ab") as file:
        file.write(b'"event": "b"}\n')
    (tmp_path / "rollout-0.jsonl").write_bytes(b'{"time": 0, "event": "c"}\n')
    assert [each["event"] for each in tail.read()] == ["c", "b"]
    assert tail.read() == []


def test_a_run_of_weeks_is_read_a_little_at_a_time_and_shown_when_all_is_there(run, monkeypatch):
    paths, config = run
    load = {"seconds": 5.0, "num_tokens": 9, "in_flight": 1, "kv_used": None}
    every = [step(number, 1.0 + number, number / 100) for number in range(1, 61)]
    loads = [event("load", 1.5 + n / 2, "rollout", id="e", **load) for n in range(90)]
    write(paths, *every, *loads)
    monkeypatch.setattr(events, "MOST", 30)
    parse, parsed, pictures = events.parse, [], []
    monkeypatch.setattr(events, "parse", lambda line: parsed.append(line) or parse(line))
    monkeypatch.setattr(run_board.curve, "plot", lambda _, drawn: pictures.append(list(drawn)))
    board, given = RunBoard(paths, config), []
    while found := board.update():
        given.append(found)
        assert not [*paths.tensorboard.glob("events*")], "a reader would forget the file before"
    assert [*paths.tensorboard.glob("events*")]
    assert [len(each) for each in given] == [30] * 5
    board.picture()
    kept = ("event", "time", "step", "reward/mean")
    assert pictures[0] == [{key: each[key] for key in kept} for each in every]
    assert len(parsed) == len(set(parsed)) == len(every) + len(loads)
    assert len(curves(read(paths.tensorboard))["reward/mean"]) == len(every)


def test_curves_wait_for_room_and_miss_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_LONGEST_S", 0.05)
    storage.settle(60.0)
    points = [Point("loss/total", n, 0.5, 0.0) for n in range(2000)]
    with small_tmpfs(tmp_path / "disk", 4) as disk:
        board = TensorBoard(disk / "tensorboard")
        board.publish()
        drawing = threading.Thread(target=lambda: (board.take(points), board.publish()))
        with full(disk):
            drawing.start()
            drawing.join(0.3)
            assert drawing.is_alive()
        drawing.join(30)
        board.close()
        found = dict(curves(read(disk / "tensorboard")))["loss/total"]
    assert found == [(n, 0.5) for n in range(2000)]
